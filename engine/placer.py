"""Choosing where Values live: within the budget, and in as little time as can be.

Three ways to fill the device, and what is true of each:

- A *chain*: Values stay in a fixed order, by the seconds that a byte saves, as many as the budget has room for. With a
  larger budget the same Values stay and perhaps more, so it is never slower.
- A *packing*: what saves most for its bytes is let in wherever it fits, gap by gap, and copies run alongside stages
  where there is room. Better, but a larger budget may pack worse. So packings are made for fixed *rungs* below the
  budget and never for the budget itself: a larger budget has all rungs of a smaller one.
- The *search* of `engine.windows`, in place of packings, for plans of few stages: on rungs too (`engine.searched`).

The fastest of all of them is taken, so a larger budget never gives a slower schedule. Homes are given in the chain's
order (`engine.homes`).

What is not guaranteed: that a placement is the fastest there is.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.budget import Budget, Tier
from engine.clock import Clock
from engine.hardware import HardwareProfile
from engine.homes import housed
from engine.needs import Bytes, Needs, Window, added_up
from engine.placement import BEFORE_FIRST, Placement, least_windows, windows_of
from engine.searched import Searched

NUM_RUNGS, RUNGS_AN_OCTAVE = 17, 4
# Of what the device may hold beyond the least, from everything down to a sixteenth: within these, a packing leaves
# at most 16 % of that unused. Below, chains fill the device.

MOST_PACKED_UNITS = 20_000
# In all packings of a plan together: about a second's work. Large plans have fewer rungs, the largest none.


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

    @cached_property
    def clock(self) -> Clock:
        """What everything takes."""
        return Clock(needs=self.needs, profile=self.profile)

    @cached_property
    def searched(self) -> Searched:
        """What the search finds."""
        return Searched(clock=self.clock, order=self._chain_order, least_windows=self._least_windows)

    # Units, and the order of Values

    @cached_property
    def units(self) -> list[Unit]:
        """All gaps of all movable Values."""
        visiting = set(self.needs.visiting)
        found: list[Unit] = []
        streamed_s = self.clock.streamed_in_all_s.tolist()
        for number in self.needs.movable:
            if number in visiting:
                found += self._gaps_of(number)
            else:
                found.append(Unit(number, None, *self._on_stage(number), streamed_s[number]))
        return found

    def _on_stage(self, number: int) -> tuple[int, int]:
        """Return the first and the last stage of a Value's life."""
        birth, death = self.needs.life(number)
        return birth, min(death, self.needs.num_stages - 1)

    def _gaps_of(self, number: int) -> Iterator[Unit]:
        """Yield the gaps of a Value that is used as a resident."""
        birth, death = self._on_stage(number)
        residents = self.needs.resident_at[number]
        mine = self.needs.streams_of.get(number, ())
        streamed = [(int(self.needs.streams.stages[n]), float(self.clock.streamed_s(Tier.HOST)[n])) for n in mine]
        trip_s = sum(self.clock.trip_s(number, Tier.HOST))

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
        saved |= {number: float(self.clock.streamed_in_all_s[number]) for number in outside}
        nbytes = self.needs.nbytes.tolist()
        return sorted(saved, key=lambda number: (-saved[number] / max(1, nbytes[number]), number))

    @cached_property
    def _chain_order(self) -> list[int]:
        movable = set(self.needs.movable)
        return [number for number in self._order if number in movable]

    # Filling the device

    def candidates(self, device_bytes: int) -> Iterator[Placement]:
        """Yield placements within ``device_bytes``, without homes; the first is the fastest where everything fits."""
        if self.needs.everything_bytes <= device_bytes:
            yield self._staying(self.needs.movable, slots=1)
            if not self.needs.outside_buffer_bytes.any():
                return
        for slots in (2, 1) if self.profile.overlap else (1,):  # where two hide nothing, a thread is only a burden
            if (chain := self._chain(device_bytes, slots)) is not None:
                yield chain
        if self.searched.is_small:
            yield from self.searched.up_to(device_bytes)
        else:
            yield from (self._packing(rung) for rung in self._rungs(device_bytes))

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
        lives = {number: (self.needs.life(number),) for number in numbers}
        doubled = self._streaming if slots > 1 else frozenset()
        return Placement(needs=self.needs, windows={**self._least_windows, **lives}, doubled=doubled)

    @cached_property
    def _least_windows(self) -> dict[int, tuple[Window, ...]]:
        return least_windows(self.needs)

    @cached_property
    def _streaming(self) -> frozenset[int]:
        """The stages with streams."""
        return frozenset(self.needs.streams.stages.tolist())

    # Packings, for plans that are not small

    def _rungs(self, device_bytes: int) -> Iterator[int]:
        """Yield the budgets up to ``device_bytes`` that packings are made for; they depend on the plan alone."""
        least = self.needs.floor[0]
        spare = self.needs.everything_bytes - least
        every = -(-NUM_RUNGS * len(self.units) // MOST_PACKED_UNITS)
        for number in range(every // 2, NUM_RUNGS, max(1, every)):
            rung = least + int(spare * 2.0 ** (-number / RUNGS_AN_OCTAVE))
            if least <= rung <= device_bytes:
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
                windows[unit.value] = (self.needs.life(unit.value),)
            else:
                kept.setdefault(unit.value, set()).add(unit.gap)
        windows |= {number: windows_of(self.needs, number, gaps) for number, gaps in kept.items()}
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
        birth, death = self.needs.life(number)
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
