"""A machine that only keeps time: the virtual clock behind ``engine simulate``.

A stage takes its compute time and that of its transfers: pieces of its streams that are off the device, and copies
that run alongside it. With one buffer a stream waits for each of its pieces. With two, and for copies alongside,
transfers hide behind compute as far as the hardware overlaps them. Other copies take their time by themselves, and so
does making a home on the disk.

Invariant: the clock of a schedule is what `engine.clock.Clock.seconds` says of its placement.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.budget import Tier
from engine.clock import copy_s, home_s
from engine.hardware import HardwareProfile
from engine.needs import touches
from engine.plan import Plan, Stage, Value


class Uncounted:
    """A machine that does nothing at all: what is left is what the ledger counts."""

    def reserve(self, staging_bytes: int) -> None: ...
    def create(self, value: Value, tier: Tier) -> None: ...
    def copy(self, value: Value, source: Tier, target: Tier, *, alongside: bool) -> None: ...
    def run(self, stage: Stage, slots: int = 1) -> None: ...
    def drop(self, value: Value, tier: Tier) -> None: ...


@dataclass
class SimulatedMachine:
    """Carries out instructions on a virtual clock.

    Attributes:
        clock_s: the time.
        stage_s: seconds of every stage, by name.
        compute_s, transfer_s: seconds of all arithmetic, and of all transfers whether hidden or not.
        waited_s: seconds by which transfers, and the engine waiting for them, made the run longer.
        moved_bytes: by route.
    """

    plan: Plan
    profile: HardwareProfile
    clock_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    compute_s: float = 0.0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    moved_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _here: set[str] = field(default_factory=set)  # Values with a copy on the device
    _home: dict[str, Tier] = field(default_factory=dict)  # the tier that others are on
    _known_s: dict[tuple[Tier, Tier, int, int], float] = field(default_factory=dict)
    _alongside_s: float = 0.0

    def reserve(self, staging_bytes: int) -> None:
        """Nothing to do: the ledger has counted it."""

    def create(self, value: Value, tier: Tier) -> None:
        self._put(value, tier)

    def drop(self, value: Value, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            self._here.remove(value.name)
        else:
            del self._home[value.name]

    def _put(self, value: Value, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            self._here.add(value.name)
        elif value.name not in self._home:
            self._home[value.name] = tier
            seconds = home_s(self.profile, value, tier)
            self.clock_s += seconds
            self.waited_s += seconds

    def copy(self, value: Value, source: Tier, target: Tier, *, alongside: bool) -> None:
        self._put(value, target)
        seconds = self._moved(source, target, value.nbytes, copy_s(self.profile, value, source, target))
        if alongside:
            self._alongside_s += seconds
        else:
            self.clock_s += seconds
            self.waited_s += seconds

    def run(self, stage: Stage, slots: int = 1) -> None:
        compute_s = self.profile.seconds(stage.cost)
        streamed_s = self._streams_s(stage)
        hidden_s, self._alongside_s = self._alongside_s, 0.0
        waited_s = 0.0
        if slots > 1:
            hidden_s += streamed_s
        else:
            waited_s = streamed_s
        seconds = self.profile.together_s(compute_s, hidden_s, waited_s)
        self.stage_s[stage.name] = seconds
        self.clock_s += seconds
        self.compute_s += compute_s
        self.waited_s += seconds - compute_s

    def _streams_s(self, stage: Stage) -> float:
        """Return the seconds of all pieces that come or go, and count their bytes."""
        seconds = 0.0
        for stream in stage.streams:
            if self._here.issuperset(stream.values):
                continue
            for name, in_bytes, out_bytes, num_pieces in touches(self.plan, stream):
                if name not in self._here:
                    tier = self._home[name]
                    if in_bytes:
                        seconds += self._transfer(tier, Tier.DEVICE, in_bytes, num_pieces)
                    if out_bytes:
                        seconds += self._transfer(Tier.DEVICE, tier, out_bytes, num_pieces)
        return seconds

    def _transfer(self, source: Tier, target: Tier, nbytes: int, num_pieces: int) -> float:
        route = source, target, nbytes, num_pieces
        seconds = self._known_s.get(route)
        if seconds is None:
            seconds = self._known_s[route] = self.profile.transfer_s(*route)
        return self._moved(source, target, nbytes, seconds)

    def _moved(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> float:
        self.moved_bytes[f"{source}->{target}"] += nbytes
        self.transfer_s += seconds
        return seconds
