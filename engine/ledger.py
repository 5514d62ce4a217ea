"""Bytes live per tier. One implementation, for the scheduler, the simulator and the runtime.

Invariant: ``live[tier]`` is the sum of the entries on that tier and never exceeds the budget; an entry is added once
and removed once.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.units import format_bytes

Watch = Callable[[Tier, str, int, int], None]
"""Is told of every change: tier, entry, bytes added (negative: removed), bytes live afterwards."""


class Ledger:
    """Counts entries (a Value, a workspace, a buffer) per tier against a budget; ``watch`` is told of each change."""

    def __init__(self, budget: Budget, watch: Watch | None = None) -> None:
        self.budget, self._watch = budget, watch
        self.live: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._entries: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}

    def free(self, tier: Tier) -> int:
        """Return the bytes that may still be added on ``tier``."""
        return self.budget[tier] - self.live[tier]

    def has(self, tier: Tier, entry: str) -> bool:
        """Return whether an entry is on ``tier``."""
        return entry in self._entries[tier]

    def add(self, tier: Tier, entry: str, nbytes: int) -> None:
        """Count ``nbytes`` for ``entry`` on ``tier``.

        Raises:
            DoesNotFitError: the budget would be exceeded; nothing is counted then.
            KeyError: the entry is there already.
        """
        if entry in self._entries[tier]:
            raise KeyError(f"{entry!r} is on {tier} already")
        if nbytes > self.free(tier):
            raise DoesNotFitError(
                f"{entry} needs {format_bytes(nbytes)} of {tier}, but only {format_bytes(self.free(tier))} of "
                f"{format_bytes(self.budget[tier])} are free"
            )
        self._entries[tier][entry] = nbytes
        live = self.live[tier] = self.live[tier] + nbytes
        if live > self.peak[tier]:
            self.peak[tier] = live
        if self._watch is not None:
            self._watch(tier, entry, nbytes, live)

    def remove(self, tier: Tier, entry: str) -> None:
        """Uncount an entry. Raises KeyError if it is not there."""
        nbytes = self._entries[tier].pop(entry)
        self.live[tier] -= nbytes
        if self._watch is not None:
            self._watch(tier, entry, -nbytes, self.live[tier])

    def residents(self, tier: Tier) -> dict[str, int]:
        """Return the entries on ``tier`` with their bytes."""
        return dict(self._entries[tier])
