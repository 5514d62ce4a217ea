"""A search for the windows of a small plan: better than packing, and dearer.

One Value after the other gets the windows that are best for it while all others stay as they are. That is a shortest
path through its uses, with three states behind each: on the device and newer than at home, on the device and the same
as at home, at home alone. All that a path costs is what it adds to the clock: transfers, as far as they are not hidden
behind the stages that they run alongside.

What is found so is improved by taking a few Values out around a stage and putting them back in another order, also at
a price for the bytes that they hold, and kept where it is faster. Everything is done for one device size after the
other, from the smallest up, each beginning with what the one before ended with: the time never rises, and what is
found for a size does not depend on which sizes are asked for later.

This module is pure: no I/O, no clock, no torch. Random numbers come from a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from engine.needs import Needs
from engine.placement import Placement, Window

_NOT_YET = float("inf")

_FASTER_S = 1e-12
# Of a second, relative to the time of the plan: less is rounding.


class Visit(NamedTuple):
    """A stage that uses a Value: ``streamed_s`` is what that takes from its home, through the ``streams``."""

    stage: int
    resident: bool
    changes: bool
    streamed_s: float
    streams: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A movable Value: its bytes, the seconds of its copies, and the stages that use it."""

    number: int
    nbytes: int
    fetch_s: float
    store_s: float
    keep: bool
    visits: tuple[Visit, ...]
    used: frozenset[int]
    resident: frozenset[int]


@dataclass(kw_only=True)
class Search:
    """Windows of a plan's Values within ``cap_bytes`` of the device, which may be raised, and what they take.

    Attributes:
        load: device bytes by stage.
        copies_s, alongside_s, streamed_s: by stage, seconds of copies that it waits for and that run alongside, and of
            its streams.
        away: of every stream, how many of its Values are not on the device.
        buffers: of every stage, its buffered streams; ``piece_bytes`` of each.
    """

    needs: Needs
    compute_s: Sequence[float]
    overlap: float
    items: Sequence[Item]
    buffers: Sequence[Sequence[int]]
    piece_bytes: Sequence[int]
    away: list[int]
    load: list[int]
    streamed_s: list[float]
    cap_bytes: int
    windows: dict[int, tuple[Window, ...]] = field(default_factory=dict)
    two: list[bool] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    alongside_s: list[float] = field(default_factory=list)
    price_s: float = 0.0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        num = len(self.compute_s)
        self.two, self.copies_s, self.alongside_s = [False] * num, [0.0] * num, [0.0] * num
        for item in self.items:
            self.windows[item.number] = self._least_windows(item)
            self._count(item, 1)

    @staticmethod
    def _least_windows(item: Item) -> tuple[Window, ...]:
        """Return the windows of a Value that is on the device where it must be and nowhere else."""
        found: list[Window] = []
        for stage in sorted(item.resident):
            if found and found[-1].last == stage - 1:
                found[-1] = Window(found[-1].first, stage)
            else:
                found.append(Window(stage, stage))
        return tuple(found)

    # What things take

    def _excess_s(self, stage: int, hidden_s: float) -> float:
        """Return what transfers behind a stage add to its compute time."""
        return max((1.0 - self.overlap) * hidden_s, hidden_s - self.overlap * self.compute_s[stage])

    def _hidden_s(self, stage: int) -> float:
        return self.alongside_s[stage] + (self.streamed_s[stage] if self.two[stage] else 0.0)

    def _stage_s(self, stage: int) -> float:
        """Return what all transfers of a stage add to its compute time."""
        alone = 0.0 if self.two[stage] else self.streamed_s[stage]
        return self.copies_s[stage] + alone + self._excess_s(stage, self._hidden_s(stage))

    def seconds(self) -> float:
        """Return the seconds of all stages beyond their compute time."""
        return sum(self._stage_s(stage) for stage in range(len(self.compute_s)))

    # Counting

    def _count(self, item: Item, sign: int) -> None:
        """Add (1) or take away (-1) what the windows of a Value hold and take, beside its uses as a resident."""
        number, last_stage = item.number, len(self.load) - 1
        windows = self.windows[number]
        birth, death = item.visits[0].stage, item.visits[-1].stage
        covered: set[int] = set()
        at_home = not windows or windows[0].first > birth
        for first, last in windows:
            span = range(first, min(last, last_stage) + 1)
            covered.update(span)
            for stage in span:
                if stage not in item.resident:
                    self.load[stage] += sign * item.nbytes
            if at_home:
                (self.copies_s if first in item.used else self.alongside_s)[first] += sign * item.fetch_s
            dirty = not at_home or any(v.changes for v in item.visits if first <= v.stage <= last)
            lives_on = last <= last_stage if item.keep else last < death
            if dirty and lives_on:
                (self.copies_s if last in item.used else self.alongside_s)[last] += sign * item.store_s
                at_home = True
        for visit in item.visits:
            if visit.stage not in covered:
                self._count_stream(visit, sign)

    def _count_stream(self, visit: Visit, sign: int) -> None:
        self.streamed_s[visit.stage] += sign * visit.streamed_s
        for stream in visit.streams:
            before = self.away[stream] > 0
            self.away[stream] += sign
            if (self.away[stream] > 0) != before:
                self.load[visit.stage] += sign * self.piece_bytes[stream] * (1 + self.two[visit.stage])

    def _double(self, stage: int, two: bool) -> None:
        if self.two[stage] != two:
            self.load[stage] += self._buffer_bytes(stage) * (1 if two else -1)
            self.two[stage] = two

    def _buffer_bytes(self, stage: int) -> int:
        return sum(self.piece_bytes[stream] for stream in self.buffers[stage] if self.away[stream] > 0)

    def double_where_there_is_room(self, stages: Iterable[int]) -> None:
        """Give streams two buffers where that is faster."""
        for stage in stages:
            helps = self.overlap > 0 and self.streamed_s[stage] > 0 and self.compute_s[stage] > 0
            if helps and not self.two[stage] and self.load[stage] + self._buffer_bytes(stage) <= self.cap_bytes:
                self._double(stage, True)

    # The best windows of one Value

    def place(self, item: Item) -> bool:
        """Give a Value that was taken out the best windows there are; say whether there were any."""
        path = _Path(self, item).best()
        if path is None:
            return False
        self.windows[item.number] = path
        self._count(item, 1)
        return True

    def take_out(self, item: Item) -> None:
        """Take away a Value, but for its bytes where it is used as a resident."""
        self._count(item, -1)
        self.windows[item.number] = ()

    def improve_each(self) -> None:
        """Place one Value after the other anew until nothing gets faster."""
        before = self.seconds()
        while True:
            for item in self.items:
                old = self.windows[item.number]
                self.take_out(item)
                if not self.place(item):
                    self.windows[item.number] = old
                    self._count(item, 1)
            self.double_where_there_is_room(range(len(self.load)))
            after = self.seconds()
            if after >= before * (1 - 1e-6):
                return
            before = after

    # Several Values at once

    def improve(self, rounds: int) -> None:
        """Take out a few Values and put them back in other ways, ``rounds`` times; keep what is faster."""
        now = self.seconds()
        typical_price_s = now / max(1, sum(self.load))
        for _ in range(rounds):
            if now <= 0 or not self.items:
                return
            saved = self._saved()
            if self._shake(typical_price_s) and (after := self.seconds()) <= now * (1 + _FASTER_S):
                now = after
            else:
                self._restore(saved)

    def _shake(self, typical_price_s: float) -> bool:
        """Take out a few Values and put them back; say whether there was room for all of them."""
        rng, num = self._random, len(self.load)
        center = rng.randrange(num)
        near = [item for item in self.items if item.visits[0].stage <= center <= item.visits[-1].stage or item.keep]
        if len(near) < 2 or rng.random() < 0.2:
            near = list(self.items)
        chosen = rng.sample(near, min(len(near), rng.randint(2, 5)))
        stages = range(max(0, center - 2), min(num, center + 3))
        for item in chosen:
            self.take_out(item)
        if rng.random() < 0.3:
            for stage in stages:
                self._double(stage, False)
        self.price_s = typical_price_s * rng.choice((0.0, 0.0, 0.5, 1.0, 2.0))
        placed = all([self.place(item) for item in chosen])
        self.price_s = 0.0
        if not placed:
            return False
        self.double_where_there_is_room(range(num))
        for item in rng.sample(chosen, len(chosen)):
            self.take_out(item)
            if not self.place(item):
                return False
        return True

    def _lists(self) -> list[list[Any]]:
        return [self.load, self.streamed_s, self.copies_s, self.alongside_s, self.away, self.two]

    def _saved(self) -> tuple[list[list[Any]], dict[int, tuple[Window, ...]]]:
        return [list(each) for each in self._lists()], dict(self.windows)

    def _restore(self, saved: tuple[list[list[Any]], dict[int, tuple[Window, ...]]]) -> None:
        for mine, old in zip(self._lists(), saved[0], strict=True):
            mine[:] = old
        self.windows = saved[1]

    def placement(self) -> Placement:
        """Return what was found."""
        return Placement(
            needs=self.needs,
            windows={number: windows for number, windows in self.windows.items() if windows},
            doubled=frozenset(stage for stage, two in enumerate(self.two) if two),
        )


NEWER, SAME, HOME = range(3)
# Where a Value is behind a use: on the device and newer than its home, there and the same as its home, at home alone.

_Step = tuple[float, int, int, int]
# The least cost of a state, the state before it, and where a window ended and another began between the two (-1: none
# did).


class _Path:
    """The shortest path of one Value through its uses; see the module."""

    def __init__(self, search: Search, item: Item) -> None:
        self.search, self.item = search, item
        self.spare = [search.cap_bytes - load - item.nbytes for load in search.load]
        self.rent_s = search.price_s * item.nbytes

    def best(self) -> tuple[Window, ...] | None:
        visits = self.item.visits
        costs = self._first(visits[0])
        trail: list[list[_Step]] = []
        for before, visit in pairwise(visits):
            steps = self._gap(costs, before, visit)
            costs = [cost for cost, *_ in steps]
            trail.append(steps)
        end = self._end(costs)
        if min(cost for cost, *_ in end) == _NOT_YET:
            return None
        state = min(range(3), key=lambda each: end[each][0])
        return self._windows(trail, state, end[state][2])

    def _first(self, visit: Visit) -> list[float]:
        here, home = self._use(visit)
        return [here, _NOT_YET, home]

    def _use(self, visit: Visit) -> tuple[float, float]:
        """Return the cost of a use with the Value on the device, and with it at home."""
        if visit.resident:
            return 0.0, _NOT_YET
        search, stage = self.search, visit.stage
        here = self.rent_s if self.spare[stage] >= 0 else _NOT_YET
        room = self.spare[stage] + self.item.nbytes
        for stream in visit.streams:
            if not search.away[stream]:
                room -= search.piece_bytes[stream] * (1 + search.two[stage])
        if room < 0:
            return here, _NOT_YET
        if not search.two[stage]:
            return here, visit.streamed_s
        hidden = search._hidden_s(stage)
        return here, search._excess_s(stage, hidden + visit.streamed_s) - search._excess_s(stage, hidden)

    def _gap(self, costs: list[float], before: Visit, visit: Visit) -> list[_Step]:
        newer, same, home = costs
        a, c = before.stage, visit.stage
        kept_s, store, fetch = self._between(a, c)
        here_s, home_s = self._use(visit)
        leave_s, leave_at = store
        come_s, come_at = fetch
        # On the device behind this use: kept, or fetched.
        stays: list[_Step] = [(newer + kept_s, NEWER, -1, -1), (same + kept_s, SAME, -1, -1)]
        comes: list[_Step] = [(home + come_s, HOME, -1, come_at), (same + come_s, SAME, a, come_at)]
        if leave_at < come_at:
            comes.append((newer + leave_s + come_s, NEWER, leave_at, come_at))
        else:
            comes += [
                (newer + self.item.store_s + come_s, NEWER, a, come_at),
                (newer + leave_s + self.item.fetch_s, NEWER, leave_at, c),
            ]
        best_same = min(stays[1], min(comes))
        at_home = min((newer + leave_s, NEWER, leave_at, -1), (same, SAME, a, -1), (home, HOME, -1, -1))
        if visit.changes:
            best_newer: _Step = min(stays[0], best_same)
            best_same = (_NOT_YET, SAME, -1, -1)
        else:
            best_newer = stays[0]
        return [
            (best_newer[0] + here_s, *best_newer[1:]),
            (best_same[0] + here_s, *best_same[1:]),
            (at_home[0] + home_s, *at_home[1:]),
        ]

    def _between(self, a: int, c: int) -> tuple[float, tuple[float, int], tuple[float, int]]:
        """Return the costs of staying through a gap, of a store and where it ends, of a fetch and where it begins."""
        spare, rent, search, item = self.spare, self.rent_s, self.search, self.item
        leave, come = (item.store_s, a), (item.fetch_s, c)
        if c == a + 1:
            return 0.0, leave, come
        rent_s = 0.0
        stage = a + 1
        while stage < c and spare[stage] >= 0:
            rent_s += rent
            hidden = search._hidden_s(stage)
            cost = search._excess_s(stage, hidden + item.store_s) - search._excess_s(stage, hidden) + rent_s
            if cost < leave[0]:
                leave = (cost, stage)
            stage += 1
        kept_s = rent_s if stage == c else _NOT_YET
        rent_s = 0.0
        stage = c - 1
        while stage > a and spare[stage] >= 0:
            rent_s += rent
            hidden = search._hidden_s(stage)
            cost = search._excess_s(stage, hidden + item.fetch_s) - search._excess_s(stage, hidden) + rent_s
            if cost < come[0]:
                come = (cost, stage)
            stage -= 1
        return kept_s, leave, come

    def _end(self, costs: list[float]) -> list[_Step]:
        newer, same, home = costs
        last = self.item.visits[-1].stage
        if not self.item.keep:
            return [(newer, NEWER, last, -1), (same, SAME, last, -1), (home, HOME, -1, -1)]
        num = len(self.spare)
        kept_s, (leave_s, leave_at), _ = self._between(last, num)
        stay, go = (newer + kept_s, NEWER, num, -1), (newer + leave_s, NEWER, leave_at, -1)
        return [min(stay, go), (same, SAME, last, -1), (home, HOME, -1, -1)]

    def _windows(self, trail: list[list[_Step]], state: int, end: int) -> tuple[Window, ...]:
        """Follow the path back and return its windows."""
        found: list[Window] = []
        last = end
        for steps in reversed(trail):
            _, before, left_at, came_at = steps[state]
            if came_at >= 0:
                found.append(Window(came_at, last))
            if (state == HOME and left_at >= 0) or (came_at >= 0 and before != HOME):
                last = left_at
            state = before
        if state != HOME:
            found.append(Window(self.item.visits[0].stage, last))
        return tuple(reversed(found))
