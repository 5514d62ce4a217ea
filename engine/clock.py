"""What a plan takes on given hardware: copies, streams and stages, and all of it under a placement.

Invariant: `Clock.seconds` of a placement is the time that the simulator reaches with its schedule
(`engine.simulated`), and, but for making homes, what the search says of it (`engine.windows`).

This module is pure: no I/O, no torch, and no clock of a machine's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from engine.budget import Tier
from engine.hardware import HardwareProfile
from engine.needs import Needs, Seconds
from engine.parts import Value
from engine.placement import TIER_CODES, Event, Placement


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


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Says what a plan's stages, and the transfers of its Values, take on given hardware."""

    needs: Needs
    profile: HardwareProfile
    _streams_s: dict[Tier, Seconds] = field(default_factory=dict, repr=False)
    _trips_s: dict[tuple[int, Tier], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def compute_s(self) -> Seconds:
        """Compute seconds of every stage."""
        return np.array([self.profile.seconds(stage.cost) for stage in self.needs.stages], dtype=np.float64)

    @cached_property
    def total_compute_s(self) -> float:
        """The time of the plan if nothing had to be transferred, which no placement improves on."""
        return float(sum(self.profile.together_s(seconds, 0.0, 0.0) for seconds in self.compute_s.tolist()))

    def streamed_s(self, tier: Tier) -> Seconds:
        """Seconds of every use in a stream, where the Value lives on ``tier``."""
        if tier not in self._streams_s:
            self._streams_s[tier] = self._computed_streams_s(tier)
        return self._streams_s[tier]

    def _computed_streams_s(self, tier: Tier) -> Seconds:
        streams, seconds = self.needs.streams, self.profile.transfer_s
        coming = seconds(tier, Tier.DEVICE, streams.in_bytes, streams.num_pieces)
        going = seconds(Tier.DEVICE, tier, streams.out_bytes, streams.num_pieces)
        return np.where(streams.in_bytes > 0, coming, 0.0) + np.where(streams.out_bytes > 0, going, 0.0)

    def trip_s(self, number: int, home: Tier) -> tuple[float, float]:
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
            stages, seconds = needs.streams.stages[chosen], self.streamed_s(tier)[chosen]
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
                seconds = self.trip_s(number, placement.home(number))[event is Event.STORE]
                (hidden if alongside else waited)[stage] += seconds

    @cached_property
    def streamed_in_all_s(self) -> Seconds:
        """Seconds of all uses of each Value in streams, from the host."""
        streams = self.needs.streams
        seconds: Seconds = np.zeros(len(self.needs.names))
        np.add.at(seconds, streams.values, self.streamed_s(Tier.HOST))
        return seconds
