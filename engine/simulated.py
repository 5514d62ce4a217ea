"""A machine that only keeps time: the virtual clock behind ``engine simulate``.

A stage takes its compute time and that of its transfers: pieces of its streams that are off the device, and copies
that run alongside it. With one buffer a stream waits for each of its pieces. With two, and for copies alongside,
transfers hide behind compute as far as the hardware overlaps them. Other copies take their time by themselves.

Invariant: the clock of a schedule is what `engine.placer.Placer.seconds` says of its placement.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.budget import Tier
from engine.hardware import HardwareProfile
from engine.needs import Touch, touches
from engine.placer import copy_s
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
        where: the tiers that every Value has a copy on; the device first.
    """

    plan: Plan
    profile: HardwareProfile
    clock_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    compute_s: float = 0.0
    transfer_s: float = 0.0
    waited_s: float = 0.0
    moved_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    where: dict[str, set[Tier]] = field(default_factory=lambda: defaultdict(set))
    _alongside_s: float = 0.0

    def reserve(self, staging_bytes: int) -> None:
        """Nothing to do: the ledger has counted it."""

    def create(self, value: Value, tier: Tier) -> None:
        self.where[value.name].add(tier)

    def drop(self, value: Value, tier: Tier) -> None:
        self.where[value.name].discard(tier)

    def copy(self, value: Value, source: Tier, target: Tier, *, alongside: bool) -> None:
        self.where[value.name].add(target)
        seconds = self._moved(source, target, value.nbytes, copy_s(self.profile, value, source, target))
        if alongside:
            self._alongside_s += seconds
        else:
            self.clock_s += seconds
            self.waited_s += seconds

    def run(self, stage: Stage, slots: int = 1) -> None:
        compute_s = self.profile.seconds(stage.cost)
        streamed_s = sum(self._stream(touch) for stream in stage.streams for touch in touches(self.plan, stream))
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

    def _stream(self, touch: Touch) -> float:
        tiers = self.where[touch.value]
        if Tier.DEVICE in tiers:
            return 0.0
        (tier,) = tiers
        seconds = 0.0
        if touch.in_bytes:
            seconds += self._transfer(tier, Tier.DEVICE, touch.in_bytes, touch.num_pieces)
        if touch.out_bytes:
            seconds += self._transfer(Tier.DEVICE, tier, touch.out_bytes, touch.num_pieces)
        return seconds

    def _transfer(self, source: Tier, target: Tier, nbytes: int, num_pieces: int) -> float:
        return self._moved(source, target, nbytes, self.profile.transfer_s(source, target, nbytes, num_pieces))

    def _moved(self, source: Tier, target: Tier, nbytes: int, seconds: float) -> float:
        self.moved_bytes[f"{source}->{target}"] += nbytes
        self.transfer_s += seconds
        return seconds
