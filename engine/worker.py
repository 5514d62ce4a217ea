"""The real machine: carries out instructions with torch tensors.

Nouns: *Held* is what exists of a Value on one tier: tensors on device or host, chunks of zarr arrays on disk, or an
object with its tensors for Values that a stage provides. `StageContext` is what a stage's function sees.

Invariants: a piece (slice along the first axis) that was never written reads as zero, on every tier; a stage cannot
tell where a streamed Value lives; copies between tiers are real copies. On disk, a piece is one chunk file of a zarr
array; its checksum is kept by the store.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from engine.budget import Tier
from engine.errors import EngineError, RunDirectoryError, StageFailedError, UnsupportedModelError
from engine.memory import DEVICE, LiveBytes
from engine.origin import at, error_origin
from engine.plan import Plan, Stage, TensorSpec, Value
from engine.run import atomic_write_bytes, data_checksum
from engine.store import Store

TOKEN_AXIS = -2
# Pieces of paged state are [..., tokens, head dimension].


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name (``float32``, ``bfloat16``, ...)."""
    return cast(torch.dtype, getattr(torch, name))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, as `engine.plan.TensorSpec` wants it."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Held:
    """What exists of a Value; ``handed_over`` are the tensors of one that its stage provided."""

    tier: Tier
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    item: Any = None
    handed_over: tuple[torch.Tensor, ...] = ()
    written: set[tuple[str, int]] = field(default_factory=set)  # pieces that exist on disk


def _piece(tensor: torch.Tensor, spec: TensorSpec, index: int) -> torch.Tensor:
    """Return a slice along the first axis; a tensor without axes is its own only piece."""
    if not tensor.dim():
        return tensor
    return tensor[index] if spec.piece_rows == 1 else tensor.narrow(0, index * spec.piece_rows, spec.piece_rows)


def _as_rows(piece: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View a piece with the first axis of its tensor, as a chunk has it."""
    return piece.view((spec.piece_rows, *spec.shape[1:]))


def _chunk(spec: TensorSpec, index: int) -> tuple[int, ...]:
    """Return where a piece lies in the grid of chunks of its array."""
    return (index,) + (0,) * (len(spec.shape) - 1)


def _as_numpy(tensor: torch.Tensor) -> Any:
    """View a CPU tensor as numpy; bfloat16, which numpy lacks, as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class TorchMachine:
    """Device, host and disk of one worker in this process.

    ``directory`` is the run directory's place for results; ``store`` holds the disk tier. ``device`` is torch's;
    on ``meta`` stages run without data, to be measured.
    """

    def __init__(
        self, plan: Plan, *, meter: LiveBytes, store: Store | None, directory: Path | None, device: str = "cpu"
    ) -> None:
        self.plan, self.meter, self.store, self.directory = plan, meter, store, directory
        self.device = torch.device(device)
        self.held: dict[str, Held] = {}
        self.results: dict[str, Any] = {}
        self.disk_peak_bytes = 0
        self.written: dict[str, dict[str, int]] = {}
        self.announce: Callable[[str, int, int], None] = lambda path, nbytes, crc32c: None
        self._provided_disk_bytes = 0
        self.taps: dict[str, list[tuple[Any, str]]] = {}
        self._staging: torch.Tensor | None = None

    # Instructions

    def reserve(self, staging_bytes: int) -> None:
        with self.meter.on_host():
            self._staging = torch.empty(staging_bytes, dtype=torch.uint8)

    def create(self, value: Value, tier: Tier) -> None:
        held = self.held[value.name] = Held(tier)
        if value.provided:
            return
        if tier is Tier.DISK:
            self._declare(value)
        else:
            held.tensors = {key: self._allocate(spec, tier) for key, spec in value.tensors.items()}

    def move(self, value: Value, source: Tier, target: Tier) -> None:
        old, new = self.held[value.name], Held(target)
        if target is Tier.DISK:
            self._declare(value)
            for key, spec in value.tensors.items():
                for index in range(spec.num_pieces):
                    self._to_disk(value.name, key, index, _piece(old.tensors[key], spec, index))
                    new.written.add((key, index))
        else:
            new.tensors = {key: self._allocate(spec, target) for key, spec in value.tensors.items()}
            for key, tensor in new.tensors.items():
                if source is not Tier.DISK:
                    tensor.copy_(old.tensors[key])
                    continue
                spec = value.tensors[key]
                for index in range(spec.num_pieces):
                    if (key, index) in old.written:
                        _piece(tensor, spec, index).copy_(self._from_disk(value.name, key, index, spec))
        self.held[value.name] = new
        if source is Tier.DISK:
            self._forget(value)

    def run(self, stage: Stage) -> None:
        context = StageContext(self, stage)
        try:
            stage.run(context)
            for tap, path in self.taps.get(stage.name, ()):
                tap(context, path)
        except (StageFailedError, RunDirectoryError, UnsupportedModelError):
            raise
        except EngineError as error:
            raise StageFailedError(f"stage {stage.name} failed: {error}{at(error_origin(error))}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what asyncio and others raise outside of Exception
            where = at(error_origin(error) or stage.origin)
            raise StageFailedError(f"stage {stage.name} failed: {type(error).__name__}: {error}{where}") from error

    def drop(self, value: Value, tier: Tier) -> None:
        del self.held[value.name]
        self.written.pop(value.name, None)
        if value.provided:
            gc.collect()  # models are cyclic, and a budget can't wait for the collector
        if tier is Tier.DISK and not value.provided:
            self._forget(value)

    # Tiers

    def _allocate(self, spec: TensorSpec, tier: Tier) -> torch.Tensor:
        if tier is Tier.HOST:
            with self.meter.on_host():
                return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
        return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)

    def note_disk(self, provided_bytes: int = 0) -> None:
        """Count files that a stage wrote itself, and raise the peak of the disk tier if need be."""
        self._provided_disk_bytes += provided_bytes
        stored_bytes = self.store.nbytes if self.store is not None else 0
        self.disk_peak_bytes = max(self.disk_peak_bytes, stored_bytes + self._provided_disk_bytes)

    def take_written(self) -> dict[str, dict[str, int]]:
        """Return the checksums of the chunks written to disk since the last call, by Value."""
        written, self.written = self.written, {}
        return written

    def _disk(self) -> Store:
        if self.store is None:
            raise EngineError("this run has no disk store, but its schedule uses the disk")
        return self.store

    def _declare(self, value: Value) -> None:
        for key, spec in value.tensors.items():
            half = spec.dtype == "bfloat16"
            self._disk().declare(
                f"{value.name}/{key}",
                shape=spec.shape or (1,),
                dtype="uint16" if half else spec.dtype,
                chunk_shape=(spec.piece_rows, *spec.shape[1:]),
                attributes={"torch_dtype": spec.dtype},
            )

    def _forget(self, value: Value) -> None:
        for key in value.tensors:
            self._disk().remove(f"{value.name}/{key}")

    def _staged(self, spec: TensorSpec) -> torch.Tensor:
        """Return the staging buffer as one piece of a tensor like ``spec``."""
        if self._staging is None:
            raise EngineError("the schedule uses the disk but reserved no staging buffer")
        return self._staging[: spec.piece_bytes].view(torch_dtype(spec.dtype)).view(spec.piece_shape)

    def _to_disk(self, name: str, key: str, index: int, piece: torch.Tensor) -> None:
        spec = self.plan.values[name].tensors[key]
        staged = self._staged(spec)
        if staged.data_ptr() != piece.data_ptr():
            staged.copy_(piece)
        chunk = _chunk(spec, index)
        store, array = self._disk(), f"{name}/{key}"
        if store.has_chunk(array, chunk):
            store.remove_chunk(array, chunk)  # old and new side by side would pass the budget by a piece
        crc = store.write_chunk(array, chunk, _as_numpy(_as_rows(staged, spec)))
        self.written.setdefault(name, {})[store.spec(array).chunk_key(chunk)] = crc
        self.note_disk()

    def _from_disk(self, name: str, key: str, index: int, spec: TensorSpec) -> torch.Tensor:
        staged = self._staged(spec)
        self._disk().read_chunk(f"{name}/{key}", _chunk(spec, index), _as_numpy(_as_rows(staged, spec)))
        return staged


class StageContext:
    """What a stage's function sees: its Values, streams of pages, and where results go.

    Streamed Values have one tensor each; a *piece* is its slice along the first axis (one layer's page).
    """

    def __init__(self, machine: TorchMachine, stage: Stage) -> None:
        self._machine, self.stage = machine, stage
        self._stream_of: dict[str, int] = {}
        for buffered in (True, False):
            for index, stream in enumerate(stage.streams):
                for name in stream.values if stream.buffered is buffered else ():
                    self._stream_of.setdefault(name, index)
        self._buffers = {
            index: torch.empty(machine.plan.buffer_bytes(stream), dtype=torch.uint8, device=machine.device)
            for index, stream in enumerate(stage.streams)
            if stream.buffered and any(machine.held[name].tier is not Tier.DEVICE for name in stream.values)
        }

    @property
    def device(self) -> torch.device:
        """Torch's device that the stage runs on."""
        return self._machine.device

    @property
    def live_bytes(self) -> int:
        """Device bytes that are live now."""
        return self._machine.meter.live[DEVICE]

    def is_provided(self, name: str) -> bool:
        """Return whether a Value is an object of its writer's making (`item`) instead of tensors."""
        return self._machine.plan.values[name].provided

    @property
    def results(self) -> dict[str, Any]:
        """Plain data that the run reports (loss, metrics, ...)."""
        return self._machine.results

    @property
    def directory(self) -> Path:
        """The directory that results go to."""
        if self._machine.directory is None:
            raise EngineError(f"stage {self.stage.name} writes files, but this run has no directory")
        return self._machine.directory

    def tensors(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return a resident Value's tensors; change them in place only if the stage writes or updates it."""
        held = self._machine.held[name]
        if held.tier is not Tier.DEVICE:
            raise EngineError(f"stage {self.stage.name} needs {name} on the device, but it is on {held.tier}")
        return held.tensors

    def provide(self, name: str, tensors: Iterable[torch.Tensor] = (), item: Any = None, disk_bytes: int = 0) -> None:
        """Hand over a provided Value: its tensors are counted from now on, ``item`` is what readers get."""
        held = self._machine.held[name]
        held.item, held.handed_over = item, tuple(tensors)
        self._machine.meter.adopt(held.handed_over)
        self._machine.note_disk(disk_bytes)

    def keep_file(self, path: str, data: bytes) -> None:
        """Write a file in the results, whole and synced, that a resumed run finds again: what must not be made twice.

        Its checksum is in the journal before it is written, so there is no moment in which it is whole and unknown.
        """
        self._machine.announce(path, *data_checksum(data))
        atomic_write_bytes(self.directory / path, data)

    def handed_over(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the writer of a provided Value handed over."""
        return self._machine.held[name].handed_over

    def item(self, name: str) -> Any:
        """Return what the writer of a provided Value handed over."""
        return self._machine.held[name].item

    def index(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Return whole numbers as an int64 tensor on the device, counted there."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        self._machine.meter.adopt([tensor])
        return tensor

    # Streams

    def _spec(self, name: str) -> tuple[str, TensorSpec]:
        return next(iter(self._machine.plan.values[name].tensors.items()))

    def _buffer(self, name: str, spec: TensorSpec) -> torch.Tensor:
        buffer = self._buffers.get(self._stream_of[name])
        if buffer is None:
            raise EngineError(f"stage {self.stage.name} reads {name}, but its stream is declared as written only")
        return buffer[: spec.piece_bytes].view(torch_dtype(spec.dtype)).view(spec.piece_shape)

    def piece(self, name: str, index: int) -> torch.Tensor:
        """Return a piece on the device, to read; good until the next piece of the same stream."""
        machine, held = self._machine, self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.DEVICE:
            return _piece(held.tensors[key], spec, index)
        buffer = self._buffer(name, spec)
        if held.tier is Tier.HOST:
            return buffer.copy_(_piece(held.tensors[key], spec, index))
        if (key, index) not in held.written:
            return buffer.zero_()
        return buffer.copy_(machine._from_disk(name, key, index, spec))

    @contextmanager
    def changing(self, name: str, index: int) -> Iterator[torch.Tensor]:
        """Yield a piece on the device to change in place; at the end it is what the Value holds, wherever it lives.

        No other piece of the same stream may be used meanwhile. After an error the piece off the device is as it was.
        """
        piece = self.piece(name, index)
        yield piece
        self._write_back(name, index, piece)

    def add_rows(self, name: str, index: int, start: int, parts: Iterable[torch.Tensor]) -> None:
        """Add ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on, in place."""
        with self.changing(name, index) as piece:
            for part_index, part in enumerate(parts):
                piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).add_(part)

    def write_rows(self, name: str, index: int, start: int, parts: Iterable[torch.Tensor]) -> None:
        """Write ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on."""
        held = self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.DISK:
            piece = self._machine._staged(spec)
            if (key, index) in held.written:
                self._machine._from_disk(name, key, index, spec)
            else:
                piece.zero_()
        else:
            piece = _piece(held.tensors[key], spec, index)
        for part_index, part in enumerate(parts):
            piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).copy_(part)
        if held.tier is Tier.DISK:
            self._write_back(name, index, piece)

    def _write_back(self, name: str, index: int, piece: torch.Tensor) -> None:
        held = self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.HOST:
            _piece(held.tensors[key], spec, index).copy_(piece)
        elif held.tier is Tier.DISK:
            self._machine._to_disk(name, key, index, piece)
            held.written.add((key, index))
