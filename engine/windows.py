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

from engine.needs import Needs, Window
from engine.placement import Placement

_NOT_YET = float("inf")

_WORTH_IT = 1e-6
# Of the time of a plan: another pass over all Values has to make it faster by more than this.

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
    """A movable Value: its bytes, the seconds of its copies, and the stages that use it.

    ``streamed`` are the visits that do not have it as a resident.
    """

    number: int
    nbytes: int
    fetch_s: float
    store_s: float
    keep: bool
    visits: tuple[Visit, ...]
    streamed: tuple[Visit, ...]
    used: frozenset[int]
    resident: frozenset[int]


_Saved = tuple[list[list[Any]], dict[int, tuple[Window, ...]], dict[int, tuple[int, ...]]]
# What a search had: its lists, windows and early stores.


@dataclass(kw_only=True)
class Search:
    """Windows of a plan's Values within ``cap_bytes`` of the device, which may be raised, and what they take.

    Attributes:
        windows: of every item, those that it begins with, and those found since.
        load: device bytes by stage.
        copies_s, alongside_s, streamed_s: by stage, seconds of copies that it waits for and that run alongside, and of
            its streams.
        away: of every stream, how many of its Values are not on the device.
        buffers: of every stage, its buffered streams; ``piece_bytes`` of each.
        seen: the part of a transfer that no compute hides; ``covered_s`` is what each stage hides of the rest.
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
    windows: dict[int, tuple[Window, ...]]
    early: dict[int, tuple[int, ...]] = field(default_factory=dict)
    two: list[bool] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    alongside_s: list[float] = field(default_factory=list)
    price_s: float = 0.0
    seen: float = field(init=False)
    covered_s: list[float] = field(init=False)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        num = len(self.compute_s)
        self.seen, self.covered_s = 1.0 - self.overlap, [self.overlap * seconds for seconds in self.compute_s]
        self.two, self.copies_s, self.alongside_s = [False] * num, [0.0] * num, [0.0] * num
        for item in self.items:
            self._count(item, 1)

    # What things take

    def added_s(self, stage: int, more_s: float) -> float:
        """Return what ``more_s`` of transfers behind a stage add to its time.

        Transfers h behind a stage of compute c add max((1 - overlap) h, h - overlap c) to c.
        """
        hidden = self.alongside_s[stage] + (self.streamed_s[stage] if self.two[stage] else 0.0)
        seen, covered = self.seen, self.covered_s[stage]
        least, most = seen * hidden, hidden - covered
        before = least if least > most else most
        hidden += more_s
        least, most = seen * hidden, hidden - covered
        return (least if least > most else most) - before

    def seconds(self) -> float:
        """Return the seconds of all stages beyond their compute time.

        That is what `engine.clock.Clock.seconds` says of `placement` with homes on the host wherever they may be
        there, but for what it takes to make homes on the disk. The search leaves that out: the clock's is never less,
        and more only where something that leaves the device may live on it and the disk alone.
        """
        total, seen = 0.0, self.seen
        rows = zip(self.copies_s, self.alongside_s, self.streamed_s, self.two, self.covered_s, strict=True)
        for waited, hidden, streamed, two, covered in rows:
            if two:
                hidden += streamed
            else:
                waited += streamed
            least, most = seen * hidden, hidden - covered
            total += waited + (least if least > most else most)
        return total

    # Counting

    def _count(self, item: Item, sign: int) -> None:
        """Add (1) or take away (-1) what the windows of a Value hold and take, beside its uses as a resident."""
        number, last_stage = item.number, len(self.load) - 1
        windows, early = self.windows[number], self.early.get(number, ())
        birth, death = item.visits[0].stage, item.visits[-1].stage
        load, nbytes = self.load, sign * item.nbytes
        at_home = not windows or windows[0].first > birth
        for first, last in windows:
            for stage in range(first, min(last, last_stage) + 1):
                load[stage] += nbytes
            if at_home:
                (self.copies_s if first in item.used else self.alongside_s)[first] += sign * item.fetch_s
            dirty = not at_home or any(v.changes for v in item.visits if first <= v.stage <= last)
            lives_on = last <= last_stage if item.keep else last < death
            if dirty and lives_on:
                stored = next((stage for stage in early if first <= stage <= last), last)
                (self.copies_s if stored in item.used else self.alongside_s)[stored] += sign * item.store_s
                at_home = True
        for stage in item.resident:  # each is in a window, and counted already
            load[stage] -= nbytes
        for visit in item.streamed:
            if not any(first <= visit.stage <= last for first, last in windows):
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
        self.windows[item.number], self.early[item.number] = path
        self._count(item, 1)
        return True

    def take_out(self, item: Item) -> None:
        """Take away a Value, but for its bytes where it is used as a resident."""
        self._count(item, -1)
        self.windows[item.number], self.early[item.number] = (), ()

    def improve_each(self) -> None:
        """Place one Value after the other anew until nothing gets faster."""
        before = self.seconds()
        while True:
            for item in self.items:
                old = self.windows[item.number], self.early.get(item.number, ())
                self.take_out(item)
                if not self.place(item):
                    self.windows[item.number], self.early[item.number] = old
                    self._count(item, 1)
            self.double_where_there_is_room(range(len(self.load)))
            after = self.seconds()
            if before - after <= _WORTH_IT * abs(before):  # rounding may make nothing a little less than nothing
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

    def _saved(self) -> _Saved:
        return [list(each) for each in self._lists()], dict(self.windows), dict(self.early)

    def _restore(self, saved: _Saved) -> None:
        for mine, old in zip(self._lists(), saved[0], strict=True):
            mine[:] = old
        _, self.windows, self.early = saved

    def placement(self) -> Placement:
        """Return what was found."""
        return Placement(
            needs=self.needs,
            windows={number: windows for number, windows in self.windows.items() if windows},
            early={number: early for number, early in self.early.items() if early},
            doubled=frozenset(stage for stage, two in enumerate(self.two) if two),
        )


NEWER, SAME, HOME = range(3)
# Where a Value is behind a use: on the device and newer than its home, there and the same as its home, at home alone.

_Step = tuple[float, int, int, int]
# The least cost of a state, the state before it, and where a window ended and another began between the two (-1: none
# did). Where the Value stayed, but is the same as its home now, it was stored where a window would have ended.

_At = tuple[float, int]
# The cost of a copy, and its stage.


class _Path:
    """The shortest path of one Value through its uses; see the module."""

    def __init__(self, search: Search, item: Item) -> None:
        self.search, self.item = search, item
        self.spare = [search.cap_bytes - load - item.nbytes for load in search.load]
        self.rent_s = search.price_s * item.nbytes

    def best(self) -> tuple[tuple[Window, ...], tuple[int, ...]] | None:
        """Return the best windows and early stores; None where there is no room for any."""
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
        return here, search.added_s(stage, visit.streamed_s) if search.two[stage] else visit.streamed_s

    def _gap(self, costs: list[float], before: Visit, visit: Visit) -> list[_Step]:
        newer, same, home = costs
        a, c = before.stage, visit.stage
        kept_s, store, fetch, early = self._between(a, c)
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
        stored: _Step = (newer + kept_s + early[0], NEWER, early[1], -1)
        at_home = min((newer + leave_s, NEWER, leave_at, -1), (same, SAME, a, -1), (home, HOME, -1, -1))
        if visit.changes:
            best_newer: _Step = min(stays[0], best_same)
            best_same = (_NOT_YET, SAME, -1, -1)
        else:
            best_newer = stays[0]
            best_same = min(best_same, stored)
        return [
            (best_newer[0] + here_s, *best_newer[1:]),
            (best_same[0] + here_s, *best_same[1:]),
            (at_home[0] + home_s, *at_home[1:]),
        ]

    def _between(self, a: int, c: int) -> tuple[float, _At, _At, _At]:
        """Return the costs of staying through a gap, of a store to leave with, of a fetch, and of a store to stay with.

        The latter three have the stage of the copy as well.
        """
        spare, rent, added_s, item = self.spare, self.rent_s, self.search.added_s, self.item
        leave, come, early = (item.store_s, a), (item.fetch_s, c), (item.store_s, a)
        if c == a + 1:
            return 0.0, leave, come, early
        rent_s = 0.0
        stage = a + 1
        while stage < c and spare[stage] >= 0:
            rent_s += rent
            cost = added_s(stage, item.store_s)
            if cost < early[0]:
                early = (cost, stage)
            if cost + rent_s < leave[0]:
                leave = (cost + rent_s, stage)
            stage += 1
        kept_s = rent_s if stage == c else _NOT_YET
        rent_s = 0.0
        stage = c - 1
        while stage > a and spare[stage] >= 0:
            rent_s += rent
            cost = added_s(stage, item.fetch_s) + rent_s
            if cost < come[0]:
                come = (cost, stage)
            stage -= 1
        return kept_s, leave, come, early

    def _end(self, costs: list[float]) -> list[_Step]:
        newer, same, home = costs
        last = self.item.visits[-1].stage
        if not self.item.keep:
            return [(newer, NEWER, last, -1), (same, SAME, last, -1), (home, HOME, -1, -1)]
        num = len(self.spare)
        kept_s, (leave_s, leave_at), _, _ = self._between(last, num)
        stay, go = (newer + kept_s, NEWER, num, -1), (newer + leave_s, NEWER, leave_at, -1)
        return [min(stay, go), (same, SAME, last, -1), (home, HOME, -1, -1)]

    def _windows(self, trail: list[list[_Step]], state: int, end: int) -> tuple[tuple[Window, ...], tuple[int, ...]]:
        """Follow the path back and return its windows and early stores."""
        found: list[Window] = []
        early: list[int] = []
        last = end
        for steps in reversed(trail):
            _, before, left_at, came_at = steps[state]
            if came_at >= 0:
                found.append(Window(came_at, last))
            if (state == HOME and left_at >= 0) or (came_at >= 0 and before != HOME):
                last = left_at
            elif left_at >= 0:
                early.append(left_at)
            state = before
        if state != HOME:
            found.append(Window(self.item.visits[0].stage, last))
        return tuple(reversed(found)), tuple(reversed(early))
