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


class Use(NamedTuple):
    """A stage, by number, that uses a Value."""

    stage: int
    resident: bool
    changes: bool


class Touch(NamedTuple):
    """Bytes of a Value that a stream brings in, takes out, or both, and in how many pieces."""

    value: str
    in_bytes: int
    out_bytes: int
    num_pieces: int


class StreamUse(NamedTuple):
    """A stage and a Value, by number, that it streams."""

    stage: int
    value: int
    touch: Touch


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The tables of a plan whose stages run in the order of ``stages``.

    Attributes:
        names: the Values' names by number.
        uses: the uses of every Value, in the order of stages.
        streams: every use of a Value in a stream that is not pinned.
        nbytes, births, deaths: of every Value.
        workspace_bytes: of every stage.
        buffer_bytes: of every stage, what its streams need with one buffer each.
        outside_buffer_bytes: the part of that for streams with Values that are never on the device.
    """

    plan: Plan
    stages: tuple[Stage, ...]
    names: list[str]
    uses: list[list[Use]]
    streams: list[StreamUse]
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
        return [number for number in self.movable if any(use.resident for use in self.uses[number])]

    @cached_property
    def changes_at(self) -> list[dict[int, bool]]:
        """For every Value, the stages that use it, and whether they change it."""
        return [{use.stage: use.changes for use in mine} for mine in self.uses]

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
        total = np.zeros(self.num_stages, dtype=np.int64)
        for number in self.visiting:
            for use in self.uses[number]:
                if use.resident:
                    total[use.stage] += self.nbytes[number]
        return total

    def least_bytes(self, slots: int) -> Bytes:
        """Return the device bytes by stage where nothing is there but what must be; streams have ``slots`` buffers."""
        return self.workspace_bytes + self.pinned_bytes + self.visiting_bytes + slots * self.buffer_bytes

    def living_bytes(self, numbers: Sequence[int], births: Numbers | None = None, end: int | None = None) -> Bytes:
        """Return the bytes of the Values ``numbers`` that are alive, by stage.

        ``births`` replace their own where given; ``end`` is the number of stages to count (one more than there are
        tells what is left at the end).
        """
        size = self.num_stages if end is None else end
        steps = np.zeros(size + 1, dtype=np.int64)
        chosen = np.asarray(numbers, dtype=np.int64)
        np.add.at(steps, (self.births if births is None else births)[chosen], self.nbytes[chosen])
        np.subtract.at(steps, np.minimum(self.deaths[chosen] + 1, size), self.nbytes[chosen])
        return np.cumsum(steps[:size])


def needs_of(plan: Plan, stages: Sequence[Stage]) -> Needs:
    """Return the tables of ``plan`` with its stages in the given order, which must be one that it allows."""
    numbers: dict[str, int] = {}
    uses: list[list[Use]] = []
    streams: list[StreamUse] = []
    largest: list[int] = []
    buffer_bytes, outside_buffer_bytes = np.zeros((2, len(stages)), dtype=np.int64)
    for index, stage in enumerate(stages):
        changes = set(stage.changes())
        resident = dict.fromkeys(stage.resident())
        for name in dict.fromkeys(stage.uses()):
            if name not in numbers:
                numbers[name] = len(numbers)
                uses.append([])
                largest.append(_largest_piece_bytes(plan.values[name]))
            on_device = name in resident and Tier.DEVICE in plan.values[name].tiers  # files are never there
            uses[numbers[name]].append(Use(index, on_device, name in changes))
        for stream in stage.streams:
            if stream.buffered:
                nbytes = max((largest[numbers[name]] for name in stream.values), default=0)
                buffer_bytes[index] += nbytes
                if any(Tier.DEVICE not in plan.values[name].tiers for name in stream.values):
                    outside_buffer_bytes[index] += nbytes
            streams += [StreamUse(index, numbers[touch.value], touch) for touch in touches(plan, stream)]
    values = [plan.values[name] for name in numbers]
    end = len(stages)
    return Needs(
        plan=plan,
        stages=tuple(stages),
        names=list(numbers),
        uses=uses,
        streams=streams,
        nbytes=np.array([value.nbytes for value in values], dtype=np.int64),
        births=np.array([mine[0].stage for mine in uses], dtype=np.int64),
        deaths=np.array(
            [end if value.keep else mine[-1].stage for value, mine in zip(values, uses, strict=True)], dtype=np.int64
        ),
        workspace_bytes=np.array([stage.workspace_bytes for stage in stages], dtype=np.int64),
        buffer_bytes=buffer_bytes,
        outside_buffer_bytes=outside_buffer_bytes,
    )


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
