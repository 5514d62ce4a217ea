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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from engine.budget import Tier
from engine.parts import Stage, Stream, Value
from engine.plan import Plan

Bytes = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Amount = TypeVar("Amount", int, Numbers)


class Window(NamedTuple):
    """Stages from ``first`` to ``last``, both included."""

    first: int
    last: int


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
        nbytes, home_bytes: of every Value on the device, and on the other tiers.
        births, deaths: of every Value.
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
    home_bytes: Bytes
    births: Numbers
    deaths: Numbers
    workspace_bytes: Bytes
    buffer_bytes: Bytes
    outside_buffer_bytes: Bytes

    @cached_property
    def num_stages(self) -> int:
        return len(self.stages)

    @cached_property
    def lives(self) -> tuple[list[int], list[int]]:
        """`births` and `deaths` as lists, for what looks at one Value after the other."""
        return self.births.tolist(), self.deaths.tolist()

    def life(self, number: int) -> Window:
        """Return the stages from a Value's birth to its death."""
        births, deaths = self.lives
        return Window(births[number], deaths[number])

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

    @cached_property
    def streams_of(self) -> dict[int, Numbers]:
        """The uses in streams of every Value that is streamed, as positions in `streams`."""
        order = np.argsort(self.streams.values, kind="stable")
        numbers, starts = np.unique(self.streams.values[order], return_index=True)
        ends = [*starts[1:].tolist(), len(order)]
        return {
            number: order[start:end]
            for number, start, end in zip(numbers.tolist(), starts.tolist(), ends[: len(numbers)], strict=True)
        }

    def least_bytes(self, slots: int) -> Bytes:
        """Return the device bytes by stage where nothing is there but what must be; streams have ``slots`` buffers."""
        return self.workspace_bytes + self.pinned_bytes + self.visiting_bytes + slots * self.buffer_bytes

    @cached_property
    def floor(self) -> tuple[int, Stage]:
        """The most of the least device bytes with one buffer a stream, and the first stage that needs them."""
        least = self.least_bytes(1)
        number = int(np.argmax(least))
        return int(least[number]), self.stages[number]

    @cached_property
    def everything_bytes(self) -> int:
        """Device bytes where nothing ever leaves, so that only streams of what is never there need a buffer."""
        living = self.living_bytes([*self.movable, *self.pinned])
        return int((living + self.workspace_bytes + self.outside_buffer_bytes).max(initial=0))

    def living_bytes(self, numbers: Sequence[int] | Numbers) -> Bytes:
        """Return the device bytes of the Values ``numbers`` that are alive, by stage."""
        return self._living(numbers, self.nbytes, self.births, self.num_stages)

    def homes_bytes(self, numbers: Sequence[int] | Numbers, births: Numbers) -> Bytes:
        """Return the bytes of the homes of Values that have them from ``births`` on, by stage and behind the last."""
        return self._living(numbers, self.home_bytes, births, self.num_stages + 1)

    def _living(self, numbers: Sequence[int] | Numbers, nbytes: Bytes, births: Numbers, size: int) -> Bytes:
        chosen = np.asarray(numbers, dtype=np.int64)
        steps = added_up(births[chosen], nbytes[chosen], size + 2)
        steps -= added_up(np.minimum(self.deaths[chosen] + 1, size), nbytes[chosen], size + 2)
        return np.cumsum(steps[:size])


def added_up(places: Numbers, nbytes: Bytes, size: int) -> Bytes:
    """Return an array of ``size`` in which each of ``nbytes`` is added at its place; sums are exact below 2^53."""
    return np.bincount(places, weights=nbytes, minlength=size)[:size].astype(np.int64)


def needs_of(plan: Plan, stages: Sequence[Stage]) -> Needs:
    """Return the tables of ``plan`` with its stages in the given order, which must be one that it allows."""
    numbers: dict[str, int] = {}
    used_at: list[list[int]] = []
    for index, stage in enumerate(stages):
        for name in stage.used:
            number = numbers.get(name)
            if number is None:
                number = numbers[name] = len(used_at)
                used_at.append([])
            used_at[number].append(index)
    values, end = [plan.values[name] for name in numbers], len(stages)
    resident_at: list[list[int]] = [[] for _ in values]
    changed_at: list[list[int]] = [[] for _ in values]
    for index, stage in enumerate(stages):
        for name in stage.changed:
            changed_at[numbers[name]].append(index)
        for name in dict.fromkeys(stage.resident()):
            if Tier.DEVICE in plan.values[name].tiers:  # files are never there
                resident_at[numbers[name]].append(index)
    streams = _streams_of(plan, stages, numbers, values)
    buffer_bytes, outside_buffer_bytes = streams.buffers(values, end)
    return Needs(
        plan=plan,
        stages=tuple(stages),
        names=list(numbers),
        used_at=used_at,
        resident_at=resident_at,
        changed_at=changed_at,
        streams=streams.uses(values),
        nbytes=np.array([plan.bytes_on(Tier.DEVICE, value) for value in values], dtype=np.int64),
        home_bytes=np.array([value.nbytes for value in values], dtype=np.int64),
        births=np.array([at[0] for at in used_at], dtype=np.int64),
        deaths=np.array(
            [end if value.keep else at[-1] for value, at in zip(values, used_at, strict=True)], dtype=np.int64
        ),
        workspace_bytes=np.array([plan.workspace_bytes(stage) for stage in stages], dtype=np.int64),
        buffer_bytes=buffer_bytes,
        outside_buffer_bytes=outside_buffer_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Streams:
    """All streams of a plan that have Values: their stages, and their Values by number, one stream behind the other.

    ``starts`` are the places in ``values`` at which each begins. ``pieces`` are those of a pass, ``buffer_bytes`` those
    of every stream.
    """

    streams: list[Stream]
    stages: Numbers
    starts: Numbers
    buffer_bytes: Bytes
    values: Numbers
    pieces: Numbers

    def buffers(self, values: Sequence[Value], num_stages: int) -> tuple[Bytes, Bytes]:
        """Return the bytes of all streams' buffers by stage, and of those with Values that are never on the device."""
        if not self.streams:
            return np.zeros(num_stages, dtype=np.int64), np.zeros(num_stages, dtype=np.int64)
        outside = np.array([Tier.DEVICE not in value.tiers for value in values])
        some_outside = np.logical_or.reduceat(outside[self.values], self.starts)
        return (
            added_up(self.stages, self.buffer_bytes, num_stages),
            added_up(self.stages, self.buffer_bytes * some_outside, num_stages),
        )

    def uses(self, values: Sequence[Value]) -> StreamUses:
        """Return the columns of all uses, but for those of pinned Values."""
        counts = np.diff(np.append(self.starts, len(self.values)))
        passes, buffered, updates = (
            np.repeat(np.array(column, dtype=np.int64), counts)
            for column in (
                [stream.passes for stream in self.streams],
                [stream.buffered for stream in self.streams],
                [stream.updates for stream in self.streams],
            )
        )
        pinned = np.array([value.pinned for value in values], dtype=bool)
        piece_bytes = np.array([value.streamed_pieces[1] for value in values], dtype=np.int64)
        in_bytes, out_bytes, num_pieces = _moved(
            self.pieces, piece_bytes[self.values], passes=passes, buffered=buffered, updates=updates
        )
        kept = ~pinned[self.values]
        return StreamUses(
            stages=np.repeat(self.stages, counts)[kept],
            values=self.values[kept],
            in_bytes=in_bytes[kept],
            out_bytes=out_bytes[kept],
            num_pieces=num_pieces[kept],
        )


def _streams_of(plan: Plan, stages: Sequence[Stage], numbers: Mapping[str, int], values: Sequence[Value]) -> _Streams:
    streams: list[Stream] = []
    owners: list[int] = []
    starts: list[int] = []
    streamed: list[int] = []
    pieces: list[int] = []
    all_pieces = [value.streamed_pieces[0] for value in values]
    for index, stage in enumerate(stages):
        for stream in stage.streams:
            if stream.values:
                mine = [numbers[name] for name in stream.values]
                streams.append(stream)
                owners.append(index)
                starts.append(len(streamed))
                streamed += mine
                pieces += stream.pieces or [all_pieces[number] for number in mine]
    columns = owners, starts, [plan.buffer_bytes(stream) for stream in streams], streamed, pieces
    owned, begun, buffer_bytes, value_numbers, piece_numbers = (np.array(each, dtype=np.int64) for each in columns)
    return _Streams(
        streams=streams,
        stages=owned,
        starts=begun,
        buffer_bytes=buffer_bytes,
        values=value_numbers,
        pieces=piece_numbers,
    )


def touches(plan: Plan, stream: Stream) -> list[Touch]:
    """Return what a stage's stream touches of every Value that is not pinned."""
    found = []
    how = {"passes": stream.passes, "buffered": stream.buffered, "updates": stream.updates}
    for position, name in enumerate(stream.values):
        value = plan.values[name]
        if not value.pinned:
            all_pieces, piece_bytes = value.streamed_pieces
            pieces = stream.pieces[position] if stream.pieces else all_pieces
            found.append(Touch(name, *_moved(pieces, piece_bytes, **how)))
    return found


def _moved(
    pieces: Amount, piece_bytes: Amount, *, passes: Amount, buffered: Amount, updates: Amount
) -> tuple[Amount, Amount, Amount]:
    """Return the bytes that a stream brings in and takes out of a Value, and in how many pieces; of arrays, of each.

    ``pieces`` are those of a pass.
    """
    touched = passes * pieces
    nbytes = touched * piece_bytes
    return nbytes * buffered, nbytes * updates, touched
