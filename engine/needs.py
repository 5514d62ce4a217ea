"""What the stages of a plan need, as tables of numbers: what the scheduler computes with.

A *use* is one stage touching one Value: *resident* (the Value is on the device while the stage runs) or *streamed*
(piece by piece, from wherever the Value lives). Stages and Values are numbered: stages in one order, Values in the
order of their first use. A Value lives from its first use, its *birth*, to its last, its *death*; the death of one that
is kept is beyond the last stage.

Kinds of Values: a *movable* one may be on the device and elsewhere too; a *pinned* one is on the device only; an
*outside* one never is.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.budget import Tier
from engine.parts import Stage, Stream, Value
from engine.plan import Plan

Bytes = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Touch(NamedTuple):
    """Bytes of a Value that a stream brings in, takes out, or both, and in how many pieces."""

    value: str
    in_bytes: int
    out_bytes: int
    num_pieces: int


@dataclass(frozen=True, kw_only=True)
class StreamUses:
    """Every use of a Value in a stream, as columns: stage and Value by number, and what `Touch` has."""

    stages: Numbers
    values: Numbers
    in_bytes: Bytes
    out_bytes: Bytes
    num_pieces: Numbers

    def __len__(self) -> int:
        return len(self.stages)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The tables of a plan whose stages run in the order of ``stages``.

    Attributes:
        names: the Values' names by number.
        used_at, resident_at, changed_at: for every Value the stages that use it, that use it as a resident, and that
            change it, each in order.
        streams: every use of a Value in a stream, but for pinned ones.
        nbytes, births, deaths: of every Value.
        workspace_bytes: of every stage.
        buffer_bytes: of every stage, what its streams need with one buffer each.
        outside_buffer_bytes: the part of that for streams with Values that are never on the device.
    """

    plan: Plan
    stages: tuple[Stage, ...]
    names: list[str]
    used_at: list[list[int]]
    resident_at: list[list[int]]
    changed_at: list[list[int]]
    streams: StreamUses
    nbytes: Bytes
    births: Numbers
    deaths: Numbers
    workspace_bytes: Bytes
    buffer_bytes: Bytes
    outside_buffer_bytes: Bytes

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def values(self) -> list[Value]:
        """The Values by number."""
        return [self.plan.values[name] for name in self.names]

    @cached_property
    def pinned(self) -> list[int]:
        """The Values that live on the device only."""
        return [number for number, value in enumerate(self.values) if value.pinned]

    @cached_property
    def movable(self) -> list[int]:
        """The Values that may live on the device and elsewhere."""
        return [number for number, value in enumerate(self.values) if Tier.DEVICE in value.tiers and not value.pinned]

    @cached_property
    def visiting(self) -> list[int]:
        """The movable Values that some stage uses as a resident; the others are only streamed."""
        return [number for number in self.movable if self.resident_at[number]]

    @cached_property
    def resident_uses(self) -> tuple[Numbers, Numbers]:
        """The uses of movable Values as residents: stages, and Values."""
        found = [(stage, number) for number in self.visiting for stage in self.resident_at[number]]
        stages, values = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return stages, values

    @cached_property
    def outside(self) -> list[int]:
        """The Values that are never on the device."""
        return [number for number, value in enumerate(self.values) if Tier.DEVICE not in value.tiers]

    @cached_property
    def pinned_bytes(self) -> Bytes:
        """Device bytes of pinned Values that are alive, by stage."""
        return self.living_bytes(self.pinned)

    @cached_property
    def visiting_bytes(self) -> Bytes:
        """Device bytes of the movable Values that each stage uses as residents."""
        stages, values = self.resident_uses
        return added_up(stages, self.nbytes[values], self.num_stages)

    def least_bytes(self, slots: int) -> Bytes:
        """Return the device bytes by stage where nothing is there but what must be; streams have ``slots`` buffers."""
        return self.workspace_bytes + self.pinned_bytes + self.visiting_bytes + slots * self.buffer_bytes

    @cached_property
    def floor(self) -> tuple[int, Stage]:
        """The most of the least device bytes with one buffer a stream, and the first stage that needs them."""
        least = self.least_bytes(1)
        number = int(np.argmax(least))
        return int(least[number]), self.stages[number]

    def living_bytes(
        self, numbers: Sequence[int] | Numbers, births: Numbers | None = None, end: int | None = None
    ) -> Bytes:
        """Return the bytes of the Values ``numbers`` that are alive, by stage.

        ``births`` replace their own where given; ``end`` is the number of stages to count (one more than there are
        tells what is left at the end).
        """
        size = self.num_stages if end is None else end
        chosen = np.asarray(numbers, dtype=np.int64)
        born = (self.births if births is None else births)[chosen]
        steps = added_up(born, self.nbytes[chosen], size + 2)
        steps -= added_up(np.minimum(self.deaths[chosen] + 1, size), self.nbytes[chosen], size + 2)
        return np.cumsum(steps[:size])


def added_up(places: Numbers, nbytes: Bytes, size: int) -> Bytes:
    """Return an array of ``size`` in which each of ``nbytes`` is added at its place; sums are exact below 2^53."""
    return np.bincount(places, weights=nbytes, minlength=size)[:size].astype(np.int64)


def needs_of(plan: Plan, stages: Sequence[Stage]) -> Needs:
    """Return the tables of ``plan`` with its stages in the given order, which must be one that it allows."""
    facts: dict[str, _Facts] = {}
    columns: tuple[list[int], ...] = ([], [], [], [], [])
    buffer_bytes, outside_buffer_bytes = np.zeros((2, len(stages)), dtype=np.int64)
    for index, stage in enumerate(stages):
        changes, resident = set(stage.changes()), set(stage.resident())
        for name in dict.fromkeys(stage.uses()):
            fact = facts.get(name)
            if fact is None:
                fact = facts[name] = _Facts(len(facts), plan.values[name])
            fact.used_at.append(index)
            if name in changes:
                fact.changed_at.append(index)
            if name in resident and not fact.outside:  # files are never there
                fact.resident_at.append(index)
        for stream in stage.streams:
            mine = [facts[name] for name in stream.values]
            if stream.buffered:
                nbytes = max((fact.largest_bytes for fact in mine), default=0)
                buffer_bytes[index] += nbytes
                if any(fact.outside for fact in mine):
                    outside_buffer_bytes[index] += nbytes
            _add_stream(columns, index, stream, mine)
    found, values = list(facts.values()), [plan.values[name] for name in facts]
    end = len(stages)
    return Needs(
        plan=plan,
        stages=tuple(stages),
        names=list(facts),
        used_at=[fact.used_at for fact in found],
        resident_at=[fact.resident_at for fact in found],
        changed_at=[fact.changed_at for fact in found],
        streams=StreamUses(
            **{key: np.array(column, dtype=np.int64) for key, column in zip(_COLUMNS, columns, strict=True)}
        ),
        nbytes=np.array([value.nbytes for value in values], dtype=np.int64),
        births=np.array([fact.used_at[0] for fact in found], dtype=np.int64),
        deaths=np.array(
            [end if value.keep else fact.used_at[-1] for value, fact in zip(values, found, strict=True)], dtype=np.int64
        ),
        workspace_bytes=np.array([stage.workspace_bytes for stage in stages], dtype=np.int64),
        buffer_bytes=buffer_bytes,
        outside_buffer_bytes=outside_buffer_bytes,
    )


class _Facts:
    """What is looked up of a Value for each of its uses, and the uses themselves."""

    __slots__ = ("changed_at", "largest_bytes", "number", "outside", "pieces", "pinned", "resident_at", "used_at")

    def __init__(self, number: int, value: Value) -> None:
        self.number, self.pinned = number, value.pinned
        self.outside = Tier.DEVICE not in value.tiers
        self.largest_bytes = _largest_piece_bytes(value)
        self.pieces = value.streamed_pieces
        self.used_at: list[int] = []
        self.resident_at: list[int] = []
        self.changed_at: list[int] = []


def _add_stream(columns: tuple[list[int], ...], index: int, stream: Stream, mine: Sequence[_Facts]) -> None:
    """Add the uses of a stream's Values to the columns of `StreamUses`."""
    stages, values, coming, going, counts = columns
    for position, fact in enumerate(mine):
        if fact.pinned:
            continue
        num_pieces, piece_bytes = fact.pieces
        touched = stream.passes * (stream.pieces[position] if stream.pieces else num_pieces)
        stages.append(index)
        values.append(fact.number)
        coming.append(touched * piece_bytes if stream.buffered else 0)
        going.append(touched * piece_bytes if stream.updates else 0)
        counts.append(touched)


_COLUMNS = ("stages", "values", "in_bytes", "out_bytes", "num_pieces")


def _largest_piece_bytes(value: Value) -> int:
    """Return the bytes of a Value's largest piece; 0 for a pinned Value, which no buffer is needed for."""
    return 0 if value.pinned else max((spec.piece_bytes for spec in value.tensors.values()), default=0)


def touches(plan: Plan, stream: Stream) -> Iterator[Touch]:
    """Yield what a stage's stream touches of every Value that is not pinned."""
    for position, name in enumerate(stream.values):
        value = plan.values[name]
        if not value.pinned:
            num_pieces, piece_bytes = value.streamed_pieces
            pieces = stream.passes * (stream.pieces[position] if stream.pieces else num_pieces)
            nbytes = pieces * piece_bytes
            yield Touch(name, nbytes if stream.buffered else 0, nbytes if stream.updates else 0, pieces)
