"""AdamW's state through a run: moments, and masters where weights are below float32; in from a file, out to one.

It is laid out as `stages.shard_layout` says. A piece of state is ``[rows, elements]``: first moment, second moment,
master. Some pieces make up a Value, which may live on any tier and is streamed, so that all of the state costs the
device one buffer of one piece.

Life cycle: the state is born in a run's first update (`stages.update`): zero moments and masters copied from the
weights, or all of it from a file. A file is held against the weights right after those are loaded (`load_stages`).
`save_stage` writes what there is. A run of one update may do without Values (``kept`` false): then a piece of state
lives only while it is used, with the same bits.

Invariant: the masters that a file holds round to the weights of the checkpoint beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import google_crc32c
import numpy as np
import torch

from engine.context import StageContext
from engine.errors import StageFailedError, UsageError
from engine.plan import Cost, Stage, Stream, TensorSpec, Value, ValueKind
from engine.tensors import dtype_name, filled_as_numpy, torch_dtype
from stages import names
from stages.files import file_value
from stages.optimizer_file import MASTER, MOMENTS, Contents, OptimizerFile, Reader, Writer, writing
from stages.shard_layout import Part, ShardLayout, looked_at

PIECES_A_VALUE = 16
# Values move between tiers as a whole: of these, part of the state may stay on the device while the rest leaves.

_TENSOR = "state"


@dataclass(frozen=True, kw_only=True)
class OptimizerState(ShardLayout):
    """The state of all updates of a run to a shard's parameters, in their accumulation dtype.

    ``source`` is the file that it starts from, None for a fresh one. ``kept`` says whether it outlives an update.

    Raises:
        UsageError: ``source`` is of other parameters, or in another dtype.
    """

    kept: bool = True
    source: OptimizerFile | None = None

    def __post_init__(self) -> None:
        if self.source is not None and not self.shard:
            _check_source(self.source, self)

    @cached_property
    def has_masters(self) -> bool:
        return any(spec.dtype != dtype_name(self.wide) for spec in self.parameters.values())

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the rows of a piece are."""
        return (*MOMENTS, MASTER) if self.has_masters else MOMENTS

    @property
    def first_count(self) -> int:
        """How many updates were done before this run."""
        return self.source.contents.count if self.source is not None else 0

    @property
    def piece_bytes(self) -> int:
        return len(self.kinds) * self.row_bytes

    def values(self) -> list[Value]:
        """Return the Values that the state is kept in; none if it is not."""
        num_pieces = len(self.pieces) if self.kept else 0
        return [
            Value(name=self._name(number), tensors={_TENSOR: self._spec(count)}, kind=ValueKind.ORDERED)
            for number, start in enumerate(range(0, num_pieces, PIECES_A_VALUE))
            if (count := min(PIECES_A_VALUE, num_pieces - start))
        ]

    def _spec(self, num_pieces: int) -> TensorSpec:
        return TensorSpec(shape=(num_pieces, len(self.kinds), self.piece_elements), dtype=dtype_name(self.wide))

    def streams(self, *, updates: bool) -> tuple[Stream, ...]:
        """Return how a stage streams the state; no stream if it is not kept."""
        values = tuple(value.name for value in self.values())
        return (Stream(values=values, updates=updates),) if values else ()

    def changing(self, context: StageContext) -> Iterator[tuple[tuple[Part, ...], torch.Tensor]]:
        """Yield every piece's parts and its state to change in place, good until the next one."""
        if self.kept:
            for number, parts in enumerate(self.pieces):
                name, index = self._place(number)
                with context.changing(name, index) as piece:
                    yield parts, piece
            return
        piece = torch.empty((len(self.kinds), self.piece_elements), dtype=self.wide, device=context.device)
        for parts in self.pieces:
            yield parts, piece.zero_()

    def reading(self, context: StageContext) -> Iterator[tuple[tuple[Part, ...], torch.Tensor]]:
        """Yield every piece's parts and its state, good until the next one."""
        for number, parts in enumerate(self.pieces):
            yield parts, context.piece(*self._place(number))

    def _name(self, number: int) -> str:
        return f"{names.of_shard(names.OPTIMIZER, self.shard)}/{number}"

    def _place(self, number: int) -> tuple[str, int]:
        value, index = divmod(number, PIECES_A_VALUE)
        return self._name(value), index

    def fill(
        self, parts: Sequence[Part], piece: torch.Tensor, reader: Reader | None, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Give a piece, which is zero, what it has before the first update: from a file, or masters from weights."""
        if reader is not None:
            for kind, row in zip(self.kinds, piece, strict=True):
                for part in parts:
                    with filled_as_numpy(part.of_piece(row)) as numbers:
                        reader.read(kind, part.parameter, part.start, numbers)
        elif self.has_masters:
            for part in parts:
                part.of_piece(piece[-1]).copy_(part.of_parameter(weights))


def _check_source(source: OptimizerFile, state: OptimizerState) -> None:
    """Raise UsageError if a file is not of these parameters, or can't be gone on from in this dtype."""
    shapes = {name: spec.shape for name, spec in state.parameters.items()}
    found = source.contents.shapes
    if wrong := [name for name in dict.fromkeys((*shapes, *found)) if shapes.get(name) != found.get(name)]:
        raise UsageError(
            f"the optimizer state {source.path} is of another model: {wrong[0]} is {_told(found.get(wrong[0]))} there "
            f"and {_told(shapes.get(wrong[0]))} in the policy ({len(wrong)} parameters differ); give the state that "
            "was saved beside the policy's checkpoint"
        )
    wide, saved = dtype_name(state.wide), source.contents.dtype
    if saved != wide:
        raise UsageError(
            f"the optimizer state {source.path} is in {saved}, but this run keeps it in {wide}; "
            "choose the dtype of the run that saved it"
        )
    if state.has_masters and MASTER not in source.contents.kinds:
        raise UsageError(
            f"the optimizer state {source.path} has no master weights, which dtype={dtype_name(state.dtype)!r} needs; "
            f"choose dtype={saved}, as the run that saved it"
        )


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def load_stages(states: Sequence[OptimizerState], *, name: str) -> list[Stage]:
    """Return the stages that hold the source of all shards' states against its checksums, and against the weights.

    They come before any work is done. Where the file has masters the weights become their rounding, so that a run loses
    nothing to a checkpoint in a narrower dtype than its own.

    Raises:
        ValueError: the states have no source.
    """
    source = states[0].source
    if source is None:
        raise ValueError("a fresh state has nothing to load")
    restored = states if MASTER in source.contents.kinds else ()
    return [_check_stage(states, source, name), *(_restore_stage(state, source) for state in restored)]


def _check_stage(states: Sequence[OptimizerState], source: OptimizerFile, name: str) -> Stage:
    """Return the stage that holds a file against its checksums; weights it leaves alone."""
    contents, longest = source.contents, max(state.piece_elements for state in states)

    def run(context: StageContext) -> None:
        buffer = torch.zeros(longest, dtype=states[0].wide, device=context.device)
        with source.reading() as reader, torch.no_grad():
            for kind in contents.kinds:
                _check(reader, source, kind, states, buffer)

    return Stage(
        name=name,
        kind="load-optimizer",
        run=run,
        config={"source": source.fingerprint},
        workspace_bytes=(longest + 1) * states[0].wide.itemsize,
        cost=Cost(read_bytes=float(contents.nbytes), moved_bytes=float(contents.nbytes)),
    )


def _check(
    reader: Reader, source: OptimizerFile, kind: str, states: Sequence[OptimizerState], buffer: torch.Tensor
) -> None:
    """Raise StageFailedError if numbers of a kind are not finite, or not those that were saved."""
    checksum = 0
    for row, parts in ((buffer[: state.piece_elements], parts) for state in states for parts in state.pieces):
        checksum = _read_row(reader, kind, parts, row, checksum)
        if not math.isfinite(torch.linalg.vector_norm(row, math.inf).item()):
            raise StageFailedError(f"the optimizer state {source.path}: {kind} has numbers that are not finite")
    if checksum != source.checksums[kind]:
        raise StageFailedError(
            f"the optimizer state {source.path} is damaged: CRC32C of {kind} is {checksum:#010x}, not "
            f"{source.checksums[kind]:#010x}; restore the file"
        )


def _restore_stage(state: OptimizerState, source: OptimizerFile) -> Stage:
    """Return the stage that makes a shard's weights the rounding of their masters in a file."""
    weights, stored = names.shard_weights(state.shard), torch_dtype(source.contents.checkpoint_dtype)
    nbytes = float(state.num_elements * state.wide.itemsize)

    def run(context: StageContext) -> None:
        parameters = state.of_value(context, weights)
        buffer = torch.zeros(state.piece_elements, dtype=state.wide, device=context.device)
        with source.reading() as reader, torch.no_grad():
            for parts in state.pieces:
                _read_row(reader, MASTER, parts, buffer, 0)
                _restore(parts, buffer, parameters, stored, source.path)

    return Stage(
        name=f"restore {weights}",
        kind="load-optimizer",
        run=run,
        config={"source": source.fingerprint},
        updates=(weights,),
        workspace_bytes=state.row_bytes + _restore_bytes(state, stored),
        cost=Cost(read_bytes=nbytes, moved_bytes=nbytes),
    )


def _read_row(reader: Reader, kind: str, parts: Sequence[Part], row: torch.Tensor, checksum: int) -> int:
    """Read a piece's numbers of one kind into ``row`` and return the checksum of all up to here."""
    for part in parts:
        with filled_as_numpy(part.of_piece(row)) as numbers:
            reader.read(kind, part.parameter, part.start, numbers)
            checksum = google_crc32c.extend(checksum, numbers.view(np.uint8))
    return checksum


def _restore_bytes(state: OptimizerState, stored: torch.dtype) -> int:
    """Return the device bytes that `_restore` needs: two roundings at a time of the largest part."""
    narrow = state.dtype.itemsize if state.dtype is not state.wide else 0
    both = stored.itemsize + state.dtype.itemsize if stored is not state.dtype else narrow
    return both * max(part.count for parts in state.pieces for part in parts)


def _restore(
    parts: Sequence[Part],
    masters: torch.Tensor,
    parameters: Mapping[str, torch.Tensor],
    stored: torch.dtype,
    path: Path,
) -> None:
    """Make weights the rounding of their masters. Raises StageFailedError if they are not those of the checkpoint."""
    for part in parts:
        weight, master = part.of_parameter(parameters), part.of_piece(masters)
        if not torch.equal(weight, master.to(weight.dtype).to(stored).to(weight.dtype)):
            raise StageFailedError(
                f"the optimizer state {path} is of other weights: {part.parameter} is not the rounding of its master; "
                "give the checkpoint that was saved with it, or start without it"
            )
        weight.copy_(master)


def save_stage(
    states: Sequence[OptimizerState],
    *,
    name: str,
    path: str,
    updates: int,
    checkpoint_dtype: torch.dtype,
    result: str = "optimizer",
) -> tuple[Stage, Value]:
    """Return the stage that writes all shards' states to ``path`` in the run's results, and the Value that it writes.

    Stage and Value have the same name. ``updates`` is how many this run has done by then, ``checkpoint_dtype`` that of
    the checkpoint that is saved with it: where it is narrower than the states', the masters are saved too. The path
    is reported as ``result``.

    Raises:
        ValueError: the states are not kept.
    """
    first = states[0]
    if not first.kept:
        raise ValueError("a state that is not kept can't be saved")
    has_masters = any(state.has_masters for state in states)
    with_masters = has_masters or checkpoint_dtype.itemsize < first.wide.itemsize
    contents = Contents(
        shapes={parameter: spec.shape for state in states for parameter, spec in state.parameters.items()},
        kinds=(*MOMENTS, MASTER) if with_masters else MOMENTS,
        dtype=dtype_name(first.wide),
        checkpoint_dtype=dtype_name(checkpoint_dtype),
        count=first.first_count + updates,
    )
    weights_are_masters = with_masters and not has_masters

    def run(context: StageContext) -> None:
        target = context.directory / path
        with writing(target, contents) as writer, torch.no_grad():
            for state in states:
                _save(context, state, writer, with_weights=weights_are_masters)
        context.results[result] = str(target)
        context.provide(name, disk_bytes=target.stat().st_size)

    pieces = tuple(value.name for state in states for value in state.values())
    masters = {names.shard_weights(state.shard): state for state in states} if weights_are_masters else {}
    reads, streams = looked_at(masters)
    stage = Stage(
        name=name,
        kind="save-optimizer",
        durable=True,
        run=run,
        config={"count": contents.count, "checkpoint_dtype": contents.checkpoint_dtype},
        reads=reads,
        writes=(name,),
        streams=(Stream(values=pieces), *streams),
        cost=Cost(written_bytes=float(contents.nbytes)),
    )
    return stage, file_value(name, contents.nbytes)


def _save(context: StageContext, state: OptimizerState, writer: Writer, *, with_weights: bool) -> None:
    """Write every piece, and its weights where they are their own masters."""
    weights: Iterable[Sequence[torch.Tensor]] = itertools.repeat(())
    if with_weights:
        weights = state.numbers(context, names.shard_weights(state.shard))
    for (parts, piece), masters in zip(state.reading(context), weights, strict=False):
        for part in parts:
            for kind, row in zip(state.kinds, piece, strict=True):
                writer.append(kind, part.of_piece(row).cpu().numpy())
        for master in masters:
            writer.append(MASTER, master.cpu().numpy())
