"""Choosing where Values live: within the budget, and in as little time as can be.

Three ways to fill the device, and what is true of each:

- A *chain*: Values stay in a fixed order, by the seconds that a byte saves, as many as the budget has room for. With a
  larger budget the same Values stay and perhaps more, so it is never slower.
- A *packing*: what saves most for its bytes is let in wherever it fits, gap by gap, and copies run alongside stages
  where there is room. Better, but a larger budget may pack worse. So packings are made for fixed *rungs* below the
  budget and never for the budget itself: a larger budget has all rungs of a smaller one.
- The *search* of `engine.windows`, in place of packings, for plans of few stages: on rungs too.

The fastest of all of them is taken, so a larger budget never gives a slower schedule. Homes are given in the chain's
order (`engine.homes`).

What is not guaranteed: that a placement is the fastest there is.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.budget import Budget, Tier
from engine.hardware import HardwareProfile
from engine.homes import housed
from engine.needs import Bytes, Needs, Seconds, added_up
from engine.parts import Stage, Value
from engine.placement import TIER_CODES, Event, Placement, Window
from engine.windows import Item, Search, Visit

NUM_RUNGS, RUNGS_AN_OCTAVE = 17, 4
# Of what the device may hold beyond the least, from everything down to a sixteenth: within these, a packing leaves
# at most 16 % of that unused. Below, chains fill the device.

MOST_PACKED_UNITS = 20_000
# In all packings of a plan together: about a second's work. Large plans have fewer rungs, the largest none.

MOST_STAGES_OF_SEARCH, MOST_USES_OF_SEARCH = 64, 1000
# Of a plan that is searched: that takes up to some seconds.

RUNGS_A_VALUE, LEAST_RUNGS, CROWDING = 3, 24, 1.5
# Rungs of the search; they are closer to each other near the least, where a byte counts most.

RUNGS_ABOVE = 2
# Rungs above a budget that are looked at for it.

ROUNDS_A_VALUE = 10
# Of a search on every rung: with three, small plans of residents and streams are 2 % slower in the mean.

MOST_EFFORT, EFFORT_OF_ONE_OF_MANY = (64, 100), (12, 20)
# Rungs, and rounds on each, at most. A plan that is one of many choices is searched for each of them, so for less long.

BEFORE_FIRST = -1
# The gap before the first stage that uses a Value as a resident.


def copy_s(profile: HardwareProfile, value: Value, source: Tier, target: Tier) -> float:
    """Return the seconds that a copy of a Value takes: a tensor at a time, but on disk every piece is a file.

    Memory that it is copied to is taken anew. (Where a home on the host is copied to again, that is a little too much.)
    What goes to the disk passes the host, and its files have a cache there: it never takes less than a copy to the
    host. So the host is never the slower home, and room on it never makes a plan slower, whatever a profile says.
    """
    specs = value.tensors.values()
    num_pieces = sum(spec.num_pieces for spec in specs) if Tier.DISK in (source, target) else len(specs)
    seconds = profile.transfer_s(source, target, value.nbytes, num_pieces)
    if target is Tier.DISK:
        return max(seconds, copy_s(profile, value, source, Tier.HOST))
    return seconds + value.nbytes / profile.fresh_bytes_per_s


def home_s(profile: HardwareProfile, value: Value, tier: Tier) -> float:
    """Return the seconds that a Value's home takes to make and to remove: on the disk, tensor by tensor."""
    return len(value.tensors) * profile.array_s if tier is Tier.DISK and value.is_stored else 0.0


class Unit(NamedTuple):
    """A gap of a Value, or its whole life where it is only streamed: on the device from ``first`` to ``last``."""

    value: int
    gap: int | None
    first: int
    last: int
    saved_s: float


@dataclass(frozen=True, kw_only=True)
class Placer:
    """Makes placements of a plan's Values on given hardware."""

    needs: Needs
    profile: HardwareProfile
    _streams_s: dict[Tier, Seconds] = field(default_factory=dict, repr=False)
    _trips_s: dict[tuple[int, Tier], tuple[float, float]] = field(default_factory=dict, repr=False)
    _rungs_found: list[tuple[int, Placement]] = field(default_factory=list, repr=False)

    # What things take

    @cached_property
    def compute_s(self) -> Seconds:
        """Compute seconds of every stage."""
        return np.array([self.profile.seconds(stage.cost) for stage in self.needs.stages], dtype=np.float64)

    @cached_property
    def total_compute_s(self) -> float:
        """The time of the plan if nothing had to be transferred, which no placement improves on."""
        return float(sum(self.profile.together_s(seconds, 0.0, 0.0) for seconds in self.compute_s.tolist()))

    def _streamed_s(self, tier: Tier) -> Seconds:
        """Seconds of every use in a stream, where the Value lives on ``tier``."""
        if tier not in self._streams_s:
            self._streams_s[tier] = self._computed_streams_s(tier)
        return self._streams_s[tier]

    def _computed_streams_s(self, tier: Tier) -> Seconds:
        streams, seconds = self.needs.streams, self.profile.transfer_s
        coming = seconds(tier, Tier.DEVICE, streams.in_bytes, streams.num_pieces)
        going = seconds(Tier.DEVICE, tier, streams.out_bytes, streams.num_pieces)
        return np.where(streams.in_bytes > 0, coming, 0.0) + np.where(streams.out_bytes > 0, going, 0.0)

    def _trip_s(self, number: int, home: Tier) -> tuple[float, float]:
        """Return the seconds of a Value's copy from its home, and of one back."""
        known = self._trips_s.get((number, home))
        if known is None:
            there = partial(copy_s, self.profile, self.needs.values[number])
            known = self._trips_s[number, home] = there(home, Tier.DEVICE), there(Tier.DEVICE, home)
        return known

    def seconds(self, placement: Placement) -> float:
        """Return the time of the plan under a placement with homes: that of the simulator, exactly."""
        needs = self.needs
        waited, hidden, streamed = [0.0] * needs.num_stages, [0.0] * needs.num_stages, np.zeros(needs.num_stages)
        for number in placement.windows:
            if not placement.stays(number):
                self._add_copies(placement, number, waited, hidden)
        for tier in set(placement.homes.values()):
            chosen = placement.streamed_from == TIER_CODES[tier]
            stages, seconds = needs.streams.stages[chosen], self._streamed_s(tier)[chosen]
            streamed += np.bincount(stages, weights=seconds, minlength=needs.num_stages)
        for stage, seconds in enumerate(streamed.tolist()):
            (hidden if stage in placement.doubled else waited)[stage] += seconds
        together = self.profile.together_s
        rows = zip(self.compute_s.tolist(), hidden, waited, strict=True)
        homes_s = sum(home_s(self.profile, needs.values[number], home) for number, home in placement.homes.items())
        return float(sum(together(compute, behind, alone) for compute, behind, alone in rows)) + homes_s

    def _add_copies(self, placement: Placement, number: int, waited: list[float], hidden: list[float]) -> None:
        """Add the time of a Value's copies."""
        for stage, _, event, _, _, alongside in placement.steps_of(number):
            if event is Event.FETCH or event is Event.STORE:
                seconds = self._trip_s(number, placement.home(number))[event is Event.STORE]
                (hidden if alongside else waited)[stage] += seconds

    # Units, and the order of Values

    @cached_property
    def units(self) -> list[Unit]:
        """All gaps of all movable Values."""
        visiting = set(self.needs.visiting)
        found: list[Unit] = []
        streamed_s = self._streamed_in_all_s.tolist()
        for number in self.needs.movable:
            if number in visiting:
                found += self._gaps_of(number)
            else:
                found.append(Unit(number, None, *self._on_stage(number), streamed_s[number]))
        return found

    @cached_property
    def _streamed_in_all_s(self) -> Seconds:
        """Seconds of all uses of each Value in streams, from the host."""
        streams = self.needs.streams
        seconds: Seconds = np.zeros(len(self.needs.names))
        np.add.at(seconds, streams.values, self._streamed_s(Tier.HOST))
        return seconds

    def _life(self, number: int) -> Window:
        """Return the window in which a Value stays."""
        births, deaths = self.needs.lives
        return Window(births[number], deaths[number])

    def _on_stage(self, number: int) -> tuple[int, int]:
        """Return the first and the last stage of a Value's life."""
        birth, death = self._life(number)
        return birth, min(death, self.needs.num_stages - 1)

    def _gaps_of(self, number: int) -> Iterator[Unit]:
        """Yield the gaps of a Value that is used as a resident."""
        birth, death = self._on_stage(number)
        residents = self.needs.resident_at[number]
        mine = self.needs.streams_of.get(number, ())
        streamed = [(int(self.needs.streams.stages[n]), float(self._streamed_s(Tier.HOST)[n])) for n in mine]
        trip_s = sum(self._trip_s(number, Tier.HOST))

        def unit(gap: int, first: int, last: int, copies_s: float) -> Unit:
            return Unit(number, gap, first, last, copies_s + sum(s for stage, s in streamed if first <= stage <= last))

        if birth < residents[0]:
            yield unit(BEFORE_FIRST, birth, residents[0] - 1, trip_s / 2)
        for stage, following in pairwise(residents):
            if following > stage + 1:
                yield unit(stage, stage + 1, following - 1, trip_s)
        if death > residents[-1]:
            yield unit(residents[-1], residents[-1] + 1, death, trip_s / 2)

    @cached_property
    def _order(self) -> list[int]:
        """Values that may live in more than one place, first those whose bytes save the most seconds."""
        outside = {number for number in self.needs.outside if len(self.needs.values[number].tiers) > 1}
        saved = dict.fromkeys(self.needs.movable, 0.0)
        for unit in self.units:
            saved[unit.value] += unit.saved_s
        saved |= {number: float(self._streamed_in_all_s[number]) for number in outside}
        nbytes = self.needs.nbytes.tolist()
        return sorted(saved, key=lambda number: (-saved[number] / max(1, nbytes[number]), number))

    @cached_property
    def _chain_order(self) -> list[int]:
        movable = set(self.needs.movable)
        return [number for number in self._order if number in movable]

    # Filling the device

    @property
    def least_bytes(self) -> int:
        """Device bytes where nothing is there but what must be."""
        return self.needs.floor[0]

    @property
    def binding_stage(self) -> Stage:
        """The stage during which the least bytes are reached."""
        return self.needs.floor[1]

    @cached_property
    def everything_bytes(self) -> int:
        """Device bytes where nothing ever leaves, so that only streams of what is never there need a buffer."""
        needs = self.needs
        living = needs.living_bytes([*needs.movable, *needs.pinned])
        return int((living + needs.workspace_bytes + needs.outside_buffer_bytes).max(initial=0))

    def candidates(self, device_bytes: int) -> Iterator[Placement]:
        """Yield placements within ``device_bytes``, without homes; the first is the fastest where everything fits."""
        if self.everything_bytes <= device_bytes:
            yield self._staying(self.needs.movable, slots=1)
            if not self.needs.outside_buffer_bytes.any():
                return
        for slots in (2, 1) if self.profile.overlap else (1,):  # where two hide nothing, a thread is only a burden
            if (chain := self._chain(device_bytes, slots)) is not None:
                yield chain
        if self._is_small:
            yield from self._found_up_to(device_bytes)
        else:
            yield from (self._packing(rung) for rung in self._rungs(device_bytes))

    def rough_s(self, device_bytes: int) -> float:
        """Return about the time of the plan within ``device_bytes``, with room on the host.

        It is what one pass of the search finds.
        """
        search = self._new_search(device_bytes)
        search.double_where_there_is_room(range(self.needs.num_stages))
        search.improve_each()
        return search.seconds()

    # Chains

    def _chain(self, device_bytes: int, slots: int) -> Placement | None:
        """Return the longest chain within ``device_bytes``; None where even the empty one is not."""
        low, high = 0, len(self._chain_order)
        if self._chain_bytes(0, slots) > device_bytes:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._chain_bytes(middle, slots) <= device_bytes else (low, middle - 1)
        return self._staying(self._chain_order[:low], slots)

    def _chain_bytes(self, length: int, slots: int) -> int:
        needs, chosen = self.needs, np.asarray(self._chain_order[:length], dtype=np.int64)
        stays = np.zeros(len(needs.names), dtype=bool)
        stays[chosen] = True
        stages, values = needs.resident_uses
        counted = stays[values]  # among what must be there already
        twice = added_up(stages[counted], needs.nbytes[values[counted]], needs.num_stages)
        return int((needs.least_bytes(slots) + needs.living_bytes(chosen) - twice).max(initial=0))

    def _staying(self, numbers: Sequence[int], slots: int) -> Placement:
        """Return a placement in which Values ``numbers`` stay and others are on the device where they must be."""
        lives = {number: (self._life(number),) for number in numbers}
        doubled = self._streaming if slots > 1 else frozenset()
        return Placement(needs=self.needs, windows={**self._least_windows, **lives}, doubled=doubled)

    @cached_property
    def _streaming(self) -> frozenset[int]:
        """The stages with streams."""
        return frozenset(self.needs.streams.stages.tolist())

    @cached_property
    def _least_windows(self) -> dict[int, tuple[Window, ...]]:
        """Windows of the movable Values that are on the device nowhere but where they must be."""
        found = {number: self._windows_of(number, frozenset()) for number in self.needs.movable}
        return {number: windows for number, windows in found.items() if windows}

    def _windows_of(self, number: int, kept: Collection[int]) -> tuple[Window, ...]:
        """Return the windows of a Value that is used as a resident, from its kept gaps."""
        last_stage, found = self.needs.num_stages - 1, []
        residents, (birth, death) = self.needs.resident_at[number], self._life(number)
        for before, stage in pairwise([BEFORE_FIRST, *residents]):
            if before == BEFORE_FIRST:
                found.append(Window(birth if BEFORE_FIRST in kept else stage, stage))
            elif before in kept or stage == before + 1:
                found[-1] = Window(found[-1].first, stage)
            else:
                found.append(Window(stage, stage))
        if residents and (residents[-1] in kept or (residents[-1] == last_stage < death)):
            found[-1] = Window(found[-1].first, death)
        return tuple(found)

    # The search, for small plans

    @cached_property
    def _is_small(self) -> bool:
        num_uses = sum(len(self.needs.used_at[number]) for number in self.needs.movable)
        return self.needs.num_stages <= MOST_STAGES_OF_SEARCH and num_uses <= MOST_USES_OF_SEARCH

    def _found_up_to(self, device_bytes: int) -> Iterator[Placement]:
        """Yield what the search finds for ``device_bytes``, the best first: on the rungs up to it, and on a few above.

        What is found on a rung may need less than that, and is there for all budgets that it fits.
        """
        if device_bytes < self.least_bytes:
            return
        num_values = len(self._chain_order)
        most_rungs, most_rounds = MOST_EFFORT if self.needs.plan.space is None else EFFORT_OF_ONE_OF_MANY
        num_rungs = min(most_rungs, max(LEAST_RUNGS, RUNGS_A_VALUE * num_values))
        spread = self.everything_bytes - self.least_bytes
        rungs = [self.least_bytes + int(spread * (rung / num_rungs) ** CROWDING) for rung in range(num_rungs)]
        num_looked_at = min(num_rungs, RUNGS_ABOVE + sum(rung <= device_bytes for rung in rungs))
        while len(self._rungs_found) < num_looked_at:
            search = self._search
            search.cap_bytes = rungs[len(self._rungs_found)]
            search.double_where_there_is_room(range(self.needs.num_stages))
            search.improve_each()
            search.improve(min(most_rounds, ROUNDS_A_VALUE * num_values))
            self._rungs_found.append((max(search.load), search.placement()))
        yield from (found for need, found in reversed(self._rungs_found[:num_looked_at]) if need <= device_bytes)

    @cached_property
    def _search(self) -> Search:
        return self._new_search(self.least_bytes)

    def _new_search(self, cap_bytes: int) -> Search:
        """Return a search that begins with nothing on the device but what must be there."""
        needs = self.needs
        streamed: dict[tuple[int, int], float] = {}
        load = (needs.least_bytes(1) - needs.buffer_bytes).tolist()
        streamed_s = [0.0] * needs.num_stages
        for index, key in enumerate(zip(needs.streams.stages.tolist(), needs.streams.values.tolist(), strict=True)):
            stage, number = key
            seconds = float(self._streamed_s(self._nearest(number))[index])
            if Tier.DEVICE in needs.values[number].tiers:
                streamed[key] = streamed.get(key, 0.0) + seconds
            else:
                streamed_s[stage] += seconds
        piece_bytes: list[int] = []
        away: list[int] = []
        buffers: list[list[int]] = []
        through: dict[tuple[int, str], list[int]] = {}
        for number, stage in enumerate(needs.stages):
            buffers.append([])
            for stream in (stream for stream in stage.streams if stream.buffered):
                buffers[-1].append(len(away))
                for name in stream.values:
                    through.setdefault((number, name), []).append(len(away))
                piece_bytes.append(needs.plan.buffer_bytes(stream))
                away.append(sum(Tier.DEVICE not in needs.plan.values[name].tiers for name in stream.values))
                load[number] += piece_bytes[-1] if away[-1] else 0
        return Search(
            needs=needs,
            compute_s=self.compute_s.tolist(),
            overlap=self.profile.overlap,
            items=[self._item(number, streamed, through) for number in self._chain_order],
            buffers=buffers,
            piece_bytes=piece_bytes,
            away=away,
            load=load,
            streamed_s=streamed_s,
            cap_bytes=cap_bytes,
        )

    def _nearest(self, number: int) -> Tier:
        return Tier.HOST if Tier.HOST in self.needs.values[number].tiers else Tier.DISK

    def _item(
        self, number: int, streamed: Mapping[tuple[int, int], float], through: Mapping[tuple[int, str], list[int]]
    ) -> Item:
        needs, home = self.needs, self._nearest(number)
        changed, resident = set(needs.changed_at[number]), set(needs.resident_at[number])
        fetch_s, store_s = self._trip_s(number, home)
        visits = tuple(
            Visit(
                stage,
                stage in resident,
                stage in changed,
                0.0 if stage in resident else streamed.get((stage, number), 0.0),
                () if stage in resident else tuple(through.get((stage, needs.names[number]), ())),
            )
            for stage in needs.used_at[number]
        )
        return Item(
            number=number,
            nbytes=int(needs.nbytes[number]),
            fetch_s=fetch_s,
            store_s=store_s,
            keep=needs.values[number].keep,
            visits=visits,
            streamed=tuple(visit for visit in visits if not visit.resident),
            used=frozenset(visit.stage for visit in visits),
            resident=frozenset(visit.stage for visit in visits if visit.resident),
        )

    # Packings, for plans that are not small

    def _rungs(self, device_bytes: int) -> Iterator[int]:
        """Yield the budgets up to ``device_bytes`` that packings are made for; they depend on the plan alone."""
        spare = self.everything_bytes - self.least_bytes
        every = -(-NUM_RUNGS * len(self.units) // MOST_PACKED_UNITS)
        for number in range(every // 2, NUM_RUNGS, max(1, every)):
            rung = self.least_bytes + int(spare * 2.0 ** (-number / RUNGS_AN_OCTAVE))
            if self.least_bytes <= rung <= device_bytes:
                yield rung

    def _packing(self, device_bytes: int) -> Placement:
        needs = self.needs
        single, double = needs.least_bytes(1), needs.least_bytes(2)
        doubled = (double <= device_bytes) & (needs.buffer_bytes > 0) & (self.profile.overlap > 0)
        free = device_bytes - np.where(doubled, double, single)
        windows = dict(self._least_windows)
        kept: dict[int, set[int]] = {}
        for unit in self._ranked:
            nbytes, span = needs.nbytes[unit.value], slice(unit.first, unit.last + 1)
            if free[span].min() < nbytes:
                continue
            free[span] -= nbytes
            if unit.gap is None:
                windows[unit.value] = (self._life(unit.value),)
            else:
                kept.setdefault(unit.value, set()).add(unit.gap)
        windows |= {number: self._windows_of(number, gaps) for number, gaps in kept.items()}
        windows = {number: self._with_copies_alongside(number, mine, free) for number, mine in windows.items()}
        return Placement(needs=needs, windows=windows, doubled=frozenset(np.flatnonzero(doubled).tolist()))

    @cached_property
    def _ranked(self) -> list[Unit]:
        """The units, those first whose bytes save the most seconds."""

        def worth(unit: Unit) -> tuple[float, int, int]:
            return (-unit.saved_s / max(1, int(self.needs.nbytes[unit.value])), unit.value, unit.first)

        return sorted(self.units, key=worth)

    def _with_copies_alongside(self, number: int, windows: tuple[Window, ...], free: Bytes) -> tuple[Window, ...]:
        """Let fetches begin a stage earlier and stores end one later where there is room for the copy until then."""
        needs, nbytes = self.needs, self.needs.nbytes[number]
        used = set(needs.used_at[number])
        birth, death = self._life(number)
        found: list[Window] = []
        for (first, last), following in zip(windows, [*windows[1:], None], strict=True):
            ahead = first - 1
            if birth < ahead and ahead not in used and (not found or found[-1].last < ahead) and free[ahead] >= nbytes:
                free[ahead] -= nbytes
                first = ahead
            behind = last + 1
            before = death if following is None else following.first
            if behind < before and behind < needs.num_stages and behind not in used and free[behind] >= nbytes:
                free[behind] -= nbytes
                last = behind
            found.append(Window(first, last))
        return tuple(found)

    # Homes

    def housed(self, placement: Placement, budget: Budget, staging_bytes: int) -> Placement:
        """Return ``placement`` with a home for everything that does not stay. Raises as `engine.homes.housed` does."""
        return housed(placement, self._order, budget, staging_bytes)
