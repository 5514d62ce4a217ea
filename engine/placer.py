"""Choosing where Values live: within the budget, and in as little time as can be.

Two ways to fill the device, and what is true of each:

- A *chain*: Values stay in a fixed order, by the seconds that a byte saves, as many as the budget has room for. With a
  larger budget the same Values stay and perhaps more, so it is never slower.
- A *packing*: what saves most for its bytes is let in wherever it fits, gap by gap, and copies run alongside stages
  where there is room. Better, but a larger budget may pack worse. So packings are made for fixed *rungs* below the
  budget and never for the budget itself: a larger budget has all rungs of a smaller one.

The fastest of all of them is taken, so a larger budget never gives a slower schedule. Homes are given in the chain's
order: the host while it has room, then the disk.

What is not guaranteed: that a placement is the fastest there is.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile
from engine.needs import Bytes, Needs, Numbers, Seconds, Touch
from engine.parts import Stage
from engine.placement import BEFORE_FIRST, Event, Placement, Step
from engine.units import format_bytes

RUNGS_AN_OCTAVE = 4
# Of what a budget has beyond the least: a packing leaves at most 16 % of that unused.

MOST_UNITS = 20_000
# Of a plan that packings are made for: beyond, they take seconds each.

MOST_UNITS_OF_SMALL = 200
# Of a plan that is packed in two ways for every rung.


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

    # What things take

    @cached_property
    def compute_s(self) -> Seconds:
        """Compute seconds of every stage."""
        return np.array([self.profile.seconds(stage.cost) for stage in self.needs.stages], dtype=np.float64)

    @cached_property
    def total_compute_s(self) -> float:
        """The time of the plan if nothing had to be transferred, which no placement improves on."""
        return float(sum(self.profile.together_s(seconds, 0.0, 0.0) for seconds in self.compute_s.tolist()))

    @cached_property
    def _stream_s(self) -> dict[Tier, Seconds]:
        """Seconds of every use in a stream, where the Value lives on a tier."""
        streams = self.needs.streams
        return {
            tier: np.array([self._touch_s(use.touch, tier) for use in streams], dtype=np.float64)
            for tier in (Tier.HOST, Tier.DISK)
        }

    def _touch_s(self, touch: Touch, tier: Tier) -> float:
        link, seconds = self.profile.transfer_s, 0.0
        if touch.in_bytes:
            seconds += link(tier, Tier.DEVICE, touch.in_bytes, touch.num_pieces)
        if touch.out_bytes:
            seconds += link(Tier.DEVICE, tier, touch.out_bytes, touch.num_pieces)
        return seconds

    @cached_property
    def _stream_stages(self) -> Numbers:
        return np.array([use.stage for use in self.needs.streams], dtype=np.int64)

    @cached_property
    def _stream_values(self) -> Numbers:
        return np.array([use.value for use in self.needs.streams], dtype=np.int64)

    def _copy_s(self, number: int, source: Tier, target: Tier) -> float:
        pieces = sum(spec.num_pieces for spec in self.needs.values[number].tensors.values())
        return self.profile.transfer_s(source, target, int(self.needs.nbytes[number]), pieces)

    def seconds(self, placement: Placement) -> float:
        """Return the time of the plan under a placement with homes: that of the simulator, exactly."""
        needs = self.needs
        waited, hidden = np.zeros(needs.num_stages), np.zeros(needs.num_stages)
        here = {number: self._copies(placement, number, waited, hidden) for number in needs.movable}
        tiers = [
            Tier.DEVICE if any(first <= use.stage <= last for first, last in here.get(use.value, ())) else
            placement.homes.get(use.value, Tier.DEVICE)
            for use in needs.streams
        ]  # fmt: skip
        streamed = np.zeros(needs.num_stages)
        for tier in (Tier.HOST, Tier.DISK):
            chosen = np.array([found is tier for found in tiers], dtype=bool)
            np.add.at(streamed, self._stream_stages[chosen], self._stream_s[tier][chosen])
        (waited if placement.slots == 1 else hidden)[:] += streamed
        together = self.profile.together_s
        rows = zip(self.compute_s.tolist(), hidden.tolist(), waited.tolist(), strict=True)
        return float(sum(together(compute, behind, alone) for compute, behind, alone in rows))

    def _copies(self, placement: Placement, number: int, waited: Seconds, hidden: Seconds) -> list[tuple[int, int]]:
        """Add the time of a Value's copies; return from which to which stage it has one on the device."""
        if number in placement.stays:
            return [(0, self.needs.num_stages)]
        home, spans, begin = placement.homes.get(number, Tier.DEVICE), [], 0
        for step in placement.steps_of(self.needs, number):
            if step.event in (Event.FETCH, Event.STORE):
                source, target = (home, Tier.DEVICE) if step.event is Event.FETCH else (Tier.DEVICE, home)
                (hidden if step.alongside else waited)[step.stage] += self._copy_s(number, source, target)
            if step.tier is Tier.DEVICE and step.event in (Event.FETCH, Event.CREATE):
                begin = step.stage
            elif step.tier is Tier.DEVICE and step.event is Event.DROP:
                spans.append((begin, step.stage))
        return spans

    # Units, and the order of Values

    @cached_property
    def units(self) -> list[Unit]:
        """All gaps of all movable Values."""
        streamed: dict[int, list[tuple[int, float]]] = {}
        for use, seconds in zip(self.needs.streams, self._stream_s[Tier.HOST].tolist(), strict=True):
            streamed.setdefault(use.value, []).append((use.stage, seconds))
        return [unit for number in self.needs.movable for unit in self._units_of(number, streamed.get(number, ()))]

    def _units_of(self, number: int, streamed: Sequence[tuple[int, float]]) -> Iterator[Unit]:
        last_stage = self.needs.num_stages - 1
        birth, death = int(self.needs.births[number]), min(int(self.needs.deaths[number]), last_stage)
        residents = [use.stage for use in self.needs.uses[number] if use.resident]
        if not residents:
            yield Unit(number, None, birth, death, sum(seconds for _, seconds in streamed))
            return
        trip_s = self._copy_s(number, Tier.HOST, Tier.DEVICE) + self._copy_s(number, Tier.DEVICE, Tier.HOST)

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
        outside = [number for number in self.needs.outside if len(self.needs.values[number].tiers) > 1]
        saved = dict.fromkeys([*self.needs.movable, *outside], 0.0)
        for unit in self.units:
            saved[unit.value] += unit.saved_s
        for number, seconds in zip(self._stream_values.tolist(), self._stream_s[Tier.HOST].tolist(), strict=True):
            if number in outside:
                saved[number] += seconds
        return sorted(saved, key=lambda number: (-saved[number] / max(1, int(self.needs.nbytes[number])), number))

    @cached_property
    def _chain_order(self) -> list[int]:
        movable = set(self.needs.movable)
        return [number for number in self._order if number in movable]

    # Filling the device

    @cached_property
    def least_bytes(self) -> int:
        """Device bytes where nothing is there but what must be."""
        return int(self.needs.least_bytes(1).max(initial=0))

    @property
    def binding_stage(self) -> Stage:
        """The stage during which the least bytes are reached."""
        return self.needs.stages[int(np.argmax(self.needs.least_bytes(1)))]

    @cached_property
    def everything_bytes(self) -> int:
        """Device bytes where nothing ever leaves, so that only streams of what is never there need a buffer."""
        needs = self.needs
        living = needs.living_bytes([*needs.movable, *needs.pinned])
        return int((living + needs.workspace_bytes + needs.outside_buffer_bytes).max(initial=0))

    def candidates(self, device_bytes: int) -> Iterator[Placement]:
        """Yield placements within ``device_bytes``, without homes; the first is the fastest where everything fits."""
        if self.everything_bytes <= device_bytes:
            yield Placement(slots=1, stays=frozenset(self.needs.movable))
            if not self.needs.outside_buffer_bytes.any():
                return
        for slots in (2, 1) if self.profile.overlap else (1,):  # where two hide nothing, a thread is only a burden
            if (chain := self._chain(device_bytes, slots)) is not None:
                yield chain
        if len(self.units) <= MOST_UNITS:
            ways = (False, True) if len(self.units) <= MOST_UNITS_OF_SMALL else (False,)
            yield from (self._packing(rung, by_time=way) for rung in self._rungs(device_bytes) for way in ways)

    def _chain(self, device_bytes: int, slots: int) -> Placement | None:
        """Return the longest chain within ``device_bytes``; None where even the empty one is not."""
        low, high = 0, len(self._chain_order)
        if self._chain_bytes(0, slots) > device_bytes:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._chain_bytes(middle, slots) <= device_bytes else (low, middle - 1)
        return Placement(slots=slots, stays=frozenset(self._chain_order[:low]))

    def _chain_bytes(self, length: int, slots: int) -> int:
        needs, chosen = self.needs, self._chain_order[:length]
        load = needs.least_bytes(slots) + needs.living_bytes(chosen)
        for number in chosen:
            for use in needs.uses[number]:
                if use.resident:
                    load[use.stage] -= needs.nbytes[number]
        return int(load.max(initial=0))

    def _rungs(self, device_bytes: int) -> Iterator[int]:
        """Yield the budgets up to ``device_bytes`` that packings are made for; they depend on the plan alone."""
        spare = min(device_bytes, self.everything_bytes) - self.least_bytes
        if spare < 0:
            return
        yield self.least_bytes
        number = 0
        while (rung := int(2.0 ** (number / RUNGS_AN_OCTAVE))) <= spare:
            yield self.least_bytes + rung
            number += 1

    def _packing(self, device_bytes: int, *, by_time: bool) -> Placement:
        """Return a packing; ``by_time`` ranks units by bytes times stages instead of by bytes."""
        needs = self.needs
        two_fit = int(needs.least_bytes(2).max(initial=0)) <= device_bytes
        slots = 2 if two_fit and self.profile.overlap else 1
        free = device_bytes - needs.least_bytes(slots)
        stays: set[int] = set()
        kept: set[tuple[int, int]] = set()
        for unit in self._ranked[by_time]:
            nbytes, span = needs.nbytes[unit.value], slice(unit.first, unit.last + 1)
            if free[span].min() < nbytes:
                continue
            free[span] -= nbytes
            if unit.gap is None:
                stays.add(unit.value)
            else:
                kept.add((unit.value, unit.gap))
        packed = Placement(slots=slots, stays=frozenset(stays), kept=frozenset(kept))
        return self._with_copies_alongside(packed, free)

    @cached_property
    def _ranked(self) -> dict[bool, list[Unit]]:
        def worth(unit: Unit, by_time: bool) -> tuple[float, int, int]:
            cost = int(self.needs.nbytes[unit.value]) * (unit.last - unit.first + 1 if by_time else 1)
            return (-unit.saved_s / max(1, cost), unit.value, unit.first)

        return {way: sorted(self.units, key=lambda unit: worth(unit, way)) for way in (False, True)}

    def _with_copies_alongside(self, placement: Placement, free: Bytes) -> Placement:
        """Let fetches run ahead and stores behind wherever there is room for the copy one stage longer."""
        needs = self.needs
        found: dict[Event, set[tuple[int, int]]] = {Event.FETCH: set(), Event.STORE: set()}
        for number in needs.movable:
            for step in placement.steps_of(needs, number):
                if step.event not in found:
                    continue
                beside = step.stage + (1 if step.event is Event.STORE else -1)
                room = 0 <= beside < needs.num_stages and free[beside] >= needs.nbytes[number]
                if room and (number, beside) not in self._used_at:
                    free[beside] -= needs.nbytes[number]
                    found[step.event].add((number, step.stage))
        return replace(placement, ahead=frozenset(found[Event.FETCH]), behind=frozenset(found[Event.STORE]))

    @cached_property
    def _used_at(self) -> set[tuple[int, int]]:
        return {(number, use.stage) for number in self.needs.movable for use in self.needs.uses[number]}

    # Homes

    def housed(self, placement: Placement, budget: Budget, staging_bytes: int) -> Placement:
        """Return ``placement`` with a home for everything that does not stay, the disk only if it is needed.

        Raises:
            DoesNotFitError: host and disk have no room for it.
        """
        leaving = [number for number in self._order if number not in placement.stays]
        births = self._home_births(placement, leaving)
        need = [number for number in leaving if births[number] <= self.needs.deaths[number]]
        hosted, others = self._split(need, births, budget.host_bytes, disk=False)
        if others:
            hosted, others = self._split(need, births, budget.host_bytes - staging_bytes, disk=True)
        fixed = [number for number in self.needs.outside if len(self.needs.values[number].tiers) == 1]
        homes = dict.fromkeys(hosted, Tier.HOST) | dict.fromkeys(others, Tier.DISK)
        homes |= {number: self.needs.values[number].tiers[0] for number in fixed}
        staging = staging_bytes if others else 0
        self._check_homes(homes, births, budget, staging)
        return replace(placement, homes=homes, staging_bytes=staging)

    def _home_births(self, placement: Placement, numbers: Sequence[int]) -> Numbers:
        """Return from which stage on each Value has a home; after its death where it never has one."""
        births = self.needs.births.copy()
        for number in numbers:
            steps = (step for step in placement.steps_of(self.needs, number) if _makes_home(step))
            first = next(steps, None)
            births[number] = int(self.needs.deaths[number]) + 1 if first is None else first.stage + (not first.before)
        return births

    def _split(
        self, need: Sequence[int], births: Numbers, host_bytes: int, *, disk: bool
    ) -> tuple[list[int], list[int]]:
        """Return which Values get a home on the host, as many as fit, and which do not."""
        values = self.needs.values
        fixed = [n for n in self.needs.outside if values[n].tiers == (Tier.HOST,)]
        must = [n for n in need if Tier.DISK not in values[n].tiers]
        may = [n for n in need if Tier.DISK in values[n].tiers and Tier.HOST in values[n].tiers]
        low, high = 0, len(may)
        while low < high:
            middle = (low + high + 1) // 2
            peak = self._home_bytes([*fixed, *must, *may[:middle]], births)
            low, high = (middle, high) if peak <= host_bytes else (low, middle - 1)
        never = [n for n in need if Tier.HOST not in values[n].tiers]
        return [*must, *may[:low]], [*may[low:], *never]

    def _home_bytes(self, numbers: Sequence[int], births: Numbers) -> int:
        return int(self.needs.living_bytes(numbers, births, self.needs.num_stages + 1).max(initial=0))

    def _check_homes(self, homes: dict[int, Tier], births: Numbers, budget: Budget, staging_bytes: int) -> None:
        for tier, extra in ((Tier.HOST, staging_bytes), (Tier.DISK, 0)):
            need = extra + self._home_bytes([n for n, home in homes.items() if home is tier], births)
            if need > budget[tier]:
                away = self._home_bytes(list(homes), births)
                buffer = f", {format_bytes(extra)} of it the buffer between device and disk" if extra else ""
                raise DoesNotFitError(
                    f"{format_bytes(away)} have to leave the device at one time, and need {format_bytes(need)} "
                    f"({need} bytes) of the {tier}{buffer}, but the budget is {format_bytes(budget.host_bytes)} of "
                    f"host and {format_bytes(budget.disk_bytes)} of disk; give more of either, or more device"
                )


def _makes_home(step: Step) -> bool:
    return step.event is Event.STORE or (step.event is Event.CREATE and step.tier is not Tier.DEVICE)
