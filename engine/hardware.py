"""Hardware profiles: what a stage's cost means in seconds.

The model is a roofline with a price per kernel: the time of a stage is the larger of its arithmetic and its memory
traffic, plus a fixed cost for each kernel it launches; moves between tiers take bytes over bandwidth. Figures of
accelerators are their vendors' peak figures; the generic CPU is a round guess for two server cores. A profile is a
JSON object with the field names of `HardwareProfile`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from engine.budget import Tier
from engine.errors import UsageError
from engine.plan import Cost


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Rates per second, in FLOPs and bytes, and the seconds that one kernel costs at least."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    host_link_bytes_per_s: float
    disk_bytes_per_s: float
    kernel_s: float
    overlap: float = 1.0

    def seconds(self, cost: Cost) -> float:
        """Return the time of a stage of this cost."""
        work = max(cost.flops / self.flops_per_s, cost.moved_bytes / self.memory_bytes_per_s)
        return work + cost.num_kernels * self.kernel_s

    def transfer_s(self, source: Tier, target: Tier, nbytes: int, num_pieces: int) -> float:
        """Return the time that ``nbytes`` in ``num_pieces`` pieces take from one tier to another."""
        seconds = 0.0
        if Tier.DEVICE in (source, target):
            seconds += nbytes / self.host_link_bytes_per_s
        if Tier.DISK in (source, target):
            seconds += nbytes / self.disk_bytes_per_s
        return seconds

    def together_s(self, compute_s: float, hidden_s: float, waited_s: float) -> float:
        """Return the time of a stage: compute, transfers hidden behind it as far as can be, transfers it waits for."""
        return max(compute_s, hidden_s) + (1.0 - self.overlap) * min(compute_s, hidden_s) + waited_s


PROFILES = {
    profile.name: profile
    for profile in (
        HardwareProfile(
            name="cpu", flops_per_s=1.5e11, memory_bytes_per_s=2e10, host_link_bytes_per_s=1e10,
            disk_bytes_per_s=1.5e9, kernel_s=1e-5,
        ),  # two server cores, float32
        HardwareProfile(
            name="h100-sxm", flops_per_s=9.89e14, memory_bytes_per_s=3.35e12, host_link_bytes_per_s=6.4e10,
            disk_bytes_per_s=5e9, kernel_s=5e-6,
        ),  # NVIDIA H100 SXM data sheet: 989 TFLOP/s dense bfloat16, 3.35 TB/s, PCIe 5.0 x16
        HardwareProfile(
            name="h200-sxm", flops_per_s=9.89e14, memory_bytes_per_s=4.8e12, host_link_bytes_per_s=6.4e10,
            disk_bytes_per_s=5e9, kernel_s=5e-6,
        ),  # NVIDIA H200 data sheet: as H100, 4.8 TB/s
    )
}  # fmt: skip


def load_profile(name: str) -> HardwareProfile:
    """Return a built-in profile, or one read from a JSON file.

    Raises:
        UsageError: no such profile or file, or the file lacks a field, has an unknown one or a rate that is not
            a positive number.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"no hardware profile {name!r}; known: {', '.join(PROFILES)}, or give a JSON file")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"hardware profile {path} is not JSON: {error}") from error
    names = {item.name for item in fields(HardwareProfile)}
    if not isinstance(data, dict) or set(data) != names:
        raise UsageError(f"hardware profile {path} must be one JSON object with the fields {', '.join(sorted(names))}")
    bad = {
        k: v
        for k, v in data.items()
        if k != "name" and not (isinstance(v, int | float) and not isinstance(v, bool) and v > 0)
    }
    if bad:
        raise UsageError(f"hardware profile {path}: not positive numbers: {bad}")
    return HardwareProfile(**data)
