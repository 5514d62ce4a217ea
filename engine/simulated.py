"""A machine that only keeps time: the virtual clock behind ``engine simulate``.

One worker does one thing at a time here: stages, moves and streams add up. Streams of pages that are off the device
cost one pass over the link (two where they are updated), disk pages a pass over the disk as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.budget import Tier
from engine.hardware import HardwareProfile
from engine.plan import Plan, Stage, Value


@dataclass
class SimulatedMachine:
    """Carries out instructions on a virtual clock (``clock_s``), counting the bytes moved per route and their time."""

    plan: Plan
    profile: HardwareProfile
    clock_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    transfer_s: float = 0.0
    where: dict[str, Tier] = field(default_factory=dict)

    def reserve(self, staging_bytes: int) -> None:
        """Nothing to do: the ledger has counted it."""

    def create(self, value: Value, tier: Tier) -> None:
        self.where[value.name] = tier

    def drop(self, value: Value, tier: Tier) -> None:
        del self.where[value.name]

    def move(self, value: Value, source: Tier, target: Tier) -> None:
        self.where[value.name] = target
        self.clock_s += self._transfer(source, target, value.nbytes)

    def run(self, stage: Stage, slots: int = 1) -> None:
        seconds = self.profile.seconds(stage.cost)
        for stream in stage.streams:
            for name in stream.values:
                seconds += self._stream(name, updates=stream.updates, passes=stream.passes)
        self.stage_s[stage.name] = seconds
        self.clock_s += seconds

    def _stream(self, name: str, *, updates: bool, passes: int) -> float:
        tier, nbytes = self.where[name], passes * self.plan.values[name].nbytes
        if tier is Tier.DEVICE:
            return 0.0
        seconds = self._transfer(tier, Tier.DEVICE, nbytes)
        return seconds + (self._transfer(Tier.DEVICE, tier, nbytes) if updates else 0.0)

    def _transfer(self, source: Tier, target: Tier, nbytes: int) -> float:
        route = f"{source}->{target}"
        self.moved_bytes[route] = self.moved_bytes.get(route, 0) + nbytes
        seconds = 0.0
        if Tier.DEVICE in (source, target):
            seconds += nbytes / self.profile.host_link_bytes_per_s
        if Tier.DISK in (source, target):
            seconds += nbytes / self.profile.disk_bytes_per_s
        self.transfer_s += seconds
        return seconds
