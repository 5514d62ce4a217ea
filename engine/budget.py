"""Tiers and budgets: how many bytes may live where.

A budget names bytes for each tier of a worker. What a person leaves out takes the defaults of `default_budget`, which
looks at the machine; everything after that is integers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.errors import UsageError
from engine.units import LARGEST_BYTES, format_bytes, parse_bytes, shortened


class Tier(StrEnum):
    """Where bytes live. The order is that of speed."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


UNLIMITED_BYTES = LARGEST_BYTES

_DEFAULT_DEVICE_SHARE_OF_RAM = 0.5
_DEFAULT_SHARE_OF_FREE_DEVICE = 0.95
_DEFAULT_HOST_SHARE_OF_RAM = 0.25
_DEFAULT_DISK_SHARE_OF_FREE = 0.8


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes that may be live on each tier of one worker."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int

    def __getitem__(self, tier: Tier) -> int:
        if tier is Tier.DEVICE:
            return self.device_bytes
        return self.host_bytes if tier is Tier.HOST else self.disk_bytes

    def as_dict(self) -> dict[str, int]:
        """Return the bytes by the tiers' names."""
        return {str(tier): self[tier] for tier in Tier}

    def __str__(self) -> str:
        return ", ".join(f"{tier} {format_bytes(self[tier])}" for tier in Tier)


def unlimited() -> Budget:
    """Return a budget that nothing exceeds."""
    return Budget(device_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)


def default_budget(directory: Path, free_device_bytes: int | None = None) -> Budget:
    """Return the budget of this machine: half of the RAM as device, a quarter as host, 80 % of the free disk.

    A device with memory of its own gives 95 % of what is free there. ``directory`` lies on the disk in question; it
    need not exist yet.
    """
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return Budget(
        device_bytes=int(
            ram * _DEFAULT_DEVICE_SHARE_OF_RAM
            if free_device_bytes is None
            else free_device_bytes * _DEFAULT_SHARE_OF_FREE_DEVICE
        ),
        host_bytes=int(ram * _DEFAULT_HOST_SHARE_OF_RAM),
        disk_bytes=int(shutil.disk_usage(existing).free * _DEFAULT_DISK_SHARE_OF_FREE),
    )


def parse_budget(text: str | None, defaults: Budget) -> Budget:
    """Return the budget that ``text`` names, such as ``device=8GiB,host=32GiB``; other tiers keep their default.

    Host and disk may be 0, which says that they are not to be used.

    Raises:
        UsageError: an unknown or repeated tier, or something that is not a size.
    """
    parts: dict[str, int] = {}
    for item in (text or "").split(","):
        if not item.strip():
            continue
        name, equals, size = item.partition("=")
        name = name.strip()
        if not equals or name not in list(Tier):
            raise UsageError(
                f"budget {shortened(text or '')!r}: {shortened(item)!r} is not one of device=, host=, disk= with a "
                "size such as 8GiB"
            )
        if name in parts:
            raise UsageError(f"budget {text!r} names {name} twice")
        parts[name] = parse_bytes(size, least=1 if name == Tier.DEVICE else 0)
    return merge_budget(parts, defaults)


def merge_budget(parts: Mapping[str, int], defaults: Budget) -> Budget:
    """Return ``defaults`` with the tiers in ``parts`` replaced (bytes)."""
    merged = {**defaults.as_dict(), **parts}
    return Budget(device_bytes=merged["device"], host_bytes=merged["host"], disk_bytes=merged["disk"])
