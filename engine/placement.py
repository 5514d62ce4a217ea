"""Where every Value of a plan lives, and what follows for its copies.

A movable Value has *windows*: stages during which it is on the device. Outside of them it is at its *home* on the
host or the disk, and is streamed from there. One whose only window is its whole life *stays*, and needs no home.

The ends of a window say how the copy comes and goes. A window that begins with a use of its Value is fetched before
that stage, which waits for it; one that begins earlier is fetched alongside its first stage. Likewise a copy that has
to be stored is stored after the window's last stage if that one uses the Value, and alongside that stage if not. The
first window of a Value that has never been anywhere else is created instead; a copy is stored as it goes if it was
changed, or has no home yet, and the Value lives on. Windows of a Value that is kept may end beyond the last stage.

Invariants: a home is there from the first time that something is put into it until the Value dies; what a stage uses
as a resident is in a window; windows of a Value neither overlap nor touch.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.budget import Tier
from engine.needs import Bytes, Needs, Numbers, Window, added_up

TIER_CODES = {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 2}
# Of tiers, in arrays.


BEFORE_FIRST = -1
# The gap before the first stage that uses a Value as a resident.


class Event(Enum):
    """What happens to a copy of a Value."""

    CREATE = "create"
    FETCH = "fetch"
    STORE = "store"
    DROP = "drop"


class Step(NamedTuple):
    """An event of a Value, before or after a stage; ``at_home`` if the copy that comes to be or goes is the one there.

    With ``alongside``, a fetch or a store runs while the stage does.
    """

    stage: int
    before: bool
    event: Event
    value: int
    at_home: bool
    alongside: bool = False


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lives; ``needs`` has the plan and the order of its stages, which numbers refer to.

    Attributes:
        windows: of movable Values that are ever on the device, in order.
        early: of Values that are stored before they leave, the stages at which they are, at most one in a window;
            nothing changes them from then to its end. Others are stored as they leave.
        doubled: the stages whose streams have two buffers each.
        homes: of all Values that are ever off the device.
        staging_bytes: host bytes through which Values pass to the disk and back; 0 where nothing is there.
    """

    needs: Needs = field(repr=False, compare=False)
    windows: Mapping[int, tuple[Window, ...]]
    early: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    doubled: frozenset[int] = frozenset()
    homes: Mapping[int, Tier] = field(default_factory=dict)
    staging_bytes: int = 0
    _steps: dict[int, Sequence[Step]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stays(self, number: int) -> bool:
        """Return whether a Value is on the device for life."""
        return number in self._staying

    @cached_property
    def _staying(self) -> frozenset[int]:
        return frozenset(number for number, mine in self.windows.items() if mine == (self.needs.life(number),))

    @cached_property
    def streamed_from(self) -> Numbers:
        """The tier that a Value is on, by `TIER_CODES`, for every use in a stream."""
        needs, device = self.needs, TIER_CODES[Tier.DEVICE]
        homes = np.full(len(needs.names), device, dtype=np.int64)
        homes[list(self.homes)] = [TIER_CODES[tier] for tier in self.homes.values()]
        codes = homes[needs.streams.values]
        for number in self.homes:
            windows, mine = self.windows.get(number), needs.streams_of.get(number)
            if windows is not None and mine is not None:
                at = needs.streams.stages[mine]
                here = np.logical_or.reduce([(window.first <= at) & (at <= window.last) for window in windows])
                codes[mine[here]] = device
        return codes

    @property
    def streamed_bytes(self) -> Bytes:
        """Bytes that come and go in streams, by stage: those of Values that are not on the device."""
        streams = self.needs.streams
        away = self.streamed_from != TIER_CODES[Tier.DEVICE]
        return added_up(streams.stages[away], (streams.in_bytes + streams.out_bytes)[away], self.needs.num_stages)

    def with_homes(self, homes: Mapping[int, Tier], staging_bytes: int) -> Placement:
        """Return the same windows with other homes."""
        found = replace(self, homes=homes, staging_bytes=staging_bytes)
        found._steps.update(self._steps)
        return found

    def home(self, number: int) -> Tier:
        """Return where a Value is when it is not on the device."""
        return self.homes[number]

    def steps_of(self, number: int) -> Sequence[Step]:
        """Return what happens to a Value, in order."""
        if number not in self._steps:
            self._steps[number] = tuple(self._steps_of(number))
        return self._steps[number]

    def _steps_of(self, number: int) -> Iterator[Step]:
        value, used_at = self.needs.values[number], self.needs.used_at[number]
        always = value.pinned or self.stays(number)
        if not always and self.windows.get(number):
            yield from self._coming_and_going(number)
            return
        yield Step(used_at[0], True, Event.CREATE, number, not always)
        if not value.keep:
            yield Step(used_at[-1], False, Event.DROP, number, not always)

    def _coming_and_going(self, number: int) -> Iterator[Step]:
        needs = self.needs
        birth, death = needs.life(number)
        used, changes = set(needs.used_at[number]), needs.changed_at[number]
        windows, early = self.windows[number], self.early.get(number, ())
        at_home = windows[0].first > birth
        if at_home:
            yield Step(birth, True, Event.CREATE, number, True)
        for first, last in windows:
            if at_home:
                yield Step(first, True, Event.FETCH, number, False, first not in used)
            else:
                yield Step(first, True, Event.CREATE, number, False)
            changed = not at_home or bisect_left(changes, first) < bisect_right(changes, last)
            if last < death and changed:
                stored = next((stage for stage in early if first <= stage <= last), last)
                alongside = stored not in used
                yield Step(stored, alongside, Event.STORE, number, True, alongside)
                at_home = True
            if last < needs.num_stages:
                yield Step(last, False, Event.DROP, number, False)
        if at_home and death < needs.num_stages:
            yield Step(death, False, Event.DROP, number, True)


def least_windows(needs: Needs) -> dict[int, tuple[Window, ...]]:
    """Return the windows of the movable Values that are on the device nowhere but where they must be."""
    return {number: windows_of(needs, number) for number in needs.visiting}


def windows_of(needs: Needs, number: int, kept: Collection[int] = ()) -> tuple[Window, ...]:
    """Return the windows of a Value that is used as a resident and stays through some of its gaps.

    ``kept`` are the stages that these gaps follow, and `BEFORE_FIRST`.
    """
    last_stage, found = needs.num_stages - 1, []
    residents, (birth, death) = needs.resident_at[number], needs.life(number)
    for before, stage in pairwise([BEFORE_FIRST, *residents]):
        if before == BEFORE_FIRST:
            found.append(Window(birth if BEFORE_FIRST in kept else stage, stage))
        elif before in kept or stage == before + 1:
            found[-1] = Window(found[-1].first, stage)
        else:
            found.append(Window(stage, stage))
    if residents[-1] in kept or (residents[-1] == last_stage < death):
        found[-1] = Window(found[-1].first, death)
    return tuple(found)
