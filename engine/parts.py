"""The parts of a plan: Values with their sizes, and Stages with their needs.

A *Value* is a named piece of intermediate state whose bytes are known at plan time. A *Stage* says which Values it
needs and how: *read*, *write* and *update* mean resident on the device while the stage runs; a *stream* goes through
a small buffer from wherever its Values live.

Both remember the line of the plan file that made them (`engine.origin`), for messages: it neither counts in a
comparison nor goes into a recipe key. This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from engine.budget import Tier
from engine.errors import PlanError
from engine.origin import at, caller_origin

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet.

    Its *pieces* are its slices along the first axis, ``piece_rows`` rows each: what a stream moves at a time, and what
    is a file on disk. A piece of one row lacks that axis.
    """

    shape: tuple[int, ...]
    dtype: str
    piece_rows: int = field(default=1, compare=False, repr=False)
    num_elements: int = field(init=False, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"dtype={self.dtype!r} is not known; choose one of {', '.join(ITEM_BYTES)}")
        shape: object = self.shape
        if not isinstance(shape, tuple):
            raise PlanError(f"shape={shape!r} is no tuple of whole numbers; write (rows, columns), or (size,)")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
            raise PlanError(f"shape={shape!r}: every size must be a whole number that is known before the run")

        rows = self.shape[0] if self.shape else 1
        if self.piece_rows < 1 or rows % self.piece_rows:
            raise PlanError(f"piece_rows={self.piece_rows!r} must divide the {rows} rows of shape={shape!r}")
        object.__setattr__(self, "num_elements", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.num_elements * ITEM_BYTES[self.dtype])

    @property
    def num_pieces(self) -> int:
        return self.shape[0] // self.piece_rows if self.shape else 1

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of one piece."""
        return self.shape[1:] if self.piece_rows == 1 else (self.piece_rows, *self.shape[1:])

    @property
    def piece_bytes(self) -> int:
        return self.nbytes // max(1, self.num_pieces)


class ValueKind(StrEnum):
    """How a Value may change."""

    IMMUTABLE = "immutable"  # one writer
    ACCUMULATOR = "accumulator"  # born zero; a chain of updates in program order; read after all of them
    ORDERED = "ordered"  # born zero; read and changed in program order (pages, weights)


ALL_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A named piece of intermediate state.

    ``tiers`` are those it may live on. ``provided`` Values are tensors or files that their stage makes itself;
    others are allocated for the stage before it runs. ``keep`` Values outlive the plan.

    What follows from the tensors is computed at once, since planning asks for it again and again: ``nbytes`` of all,
    ``largest_piece_bytes`` of any, ``buffer_bytes``, which is what a stream's buffer needs for it (nothing if it can't
    leave the device), and ``streamed_pieces``, how many pieces the first one has, which is the one that streams go
    through, and the bytes of each.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    kind: ValueKind = ValueKind.IMMUTABLE
    tiers: tuple[Tier, ...] = ALL_TIERS
    provided: bool = False
    keep: bool = False
    origin: str = field(default_factory=caller_origin, compare=False, repr=False)
    nbytes: int = field(init=False, compare=False, repr=False)
    largest_piece_bytes: int = field(init=False, compare=False, repr=False)
    buffer_bytes: int = field(init=False, compare=False, repr=False)
    streamed_pieces: tuple[int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        specs = list(self.tensors.values())
        object.__setattr__(self, "nbytes", sum([spec.nbytes for spec in specs]))
        object.__setattr__(self, "largest_piece_bytes", max([spec.piece_bytes for spec in specs], default=0))
        object.__setattr__(self, "buffer_bytes", 0 if self.pinned else self.largest_piece_bytes)
        first = (specs[0].num_pieces, specs[0].piece_bytes) if specs else (0, 0)
        object.__setattr__(self, "streamed_pieces", first)

    @property
    def pinned(self) -> bool:
        """True if it can live on the device only."""
        return self.tiers == (Tier.DEVICE,)

    @property
    def is_stored(self) -> bool:
        """True if it is in the run's store while it is on the disk; a file that its stage writes is not."""
        return not self.provided and Tier.DISK in self.tiers


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Values that a stage uses piece by piece, from wherever they live.

    Pieces of Values that are off the device pass through one buffer of the largest piece, or through two, so that the
    next one comes while one is used. A stream whose pieces are only written has no use for it (``buffered`` false).
    ``passes`` is how often the stage goes through them; ``pieces`` says how many pieces of each Value a pass touches
    where that is not all of them, for the time it takes.
    """

    values: tuple[str, ...]
    updates: bool = False
    buffered: bool = True
    passes: int = 1
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a stage does, by kind, in units that a hardware profile turns into seconds.

    Attributes:
        flops: of matrix products; a multiply-add is two.
        attention_flops, attention_backward_flops: of the attention kernels, which run at rates of their own.
        attention_scores: pairs of query and key, a head each, that go through the softmax.
        moved_bytes: read and written in the device's memory.
        weight_bytes: of weights that matrix products read, once a product: beside few rows, they are what takes time.
        read_bytes, written_bytes: of files that the stage itself reads and writes.
        num_kernels: operators that are dispatched.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0
    attention_scores: float = 0.0
    moved_bytes: float = 0.0
    weight_bytes: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    num_kernels: float = 0.0

    def __post_init__(self) -> None:
        for kind, number in self.by_kind().items():
            if not 0 <= number < math.inf:
                raise PlanError(f"{kind}={number!r} of a cost must be a finite number of at least 0")

    def by_kind(self) -> dict[str, float]:
        """Return the numbers by their names."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{kind: number + getattr(other, kind) for kind, number in self.by_kind().items()})

    def times(self, factor: float) -> Cost:
        """Return the cost of doing it ``factor`` times."""
        return Cost(**{kind: factor * number for kind, number in self.by_kind().items()})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work. ``run`` takes the worker's context (`engine.context.StageContext`).

    ``config`` is all that decides the result beside the inputs: it goes into the recipe key.
    ``workspace_bytes`` is what the stage needs on the device only while it runs, beyond its Values and buffers;
    ``declared_bytes`` is what its author declared as such, where the engine added to that by itself. The commit of a
    ``durable`` stage is on disk before the next one begins.
    """

    name: str
    kind: str
    run: Callable[[Any], None]
    config: Mapping[str, object] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    streams: tuple[Stream, ...] = ()
    workspace_bytes: int = 0
    cost: Cost = field(default_factory=Cost)
    durable: bool = False
    declared_bytes: int | None = field(default=None, compare=False)
    origin: str = field(default_factory=caller_origin, compare=False, repr=False)

    def __post_init__(self) -> None:
        nbytes: object = self.workspace_bytes
        if not isinstance(nbytes, int) or nbytes < 0:
            raise PlanError(
                f"stage {self.name!r} has workspace_bytes={nbytes!r}; give a whole number of bytes, 0 or more"
                f"{at(self.origin)}"
            )

    def resident(self) -> Iterator[str]:
        """Yield the Values that are on the device while the stage runs."""
        yield from self.reads
        yield from self.updates
        yield from self.writes

    @cached_property
    def used(self) -> tuple[str, ...]:
        """Every Value that the stage touches, once, in order."""
        streamed = [name for stream in self.streams for name in stream.values]
        return tuple(dict.fromkeys((*self.reads, *self.updates, *self.writes, *streamed)))

    @cached_property
    def changed(self) -> frozenset[str]:
        """The Values that the stage writes or updates."""
        streamed = [name for stream in self.streams if stream.updates for name in stream.values]
        return frozenset((*self.writes, *self.updates, *streamed))
