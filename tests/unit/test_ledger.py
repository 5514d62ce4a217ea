"""The ledger against a dict: never above the budget, every byte that came goes, the peak is the largest sum."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.ledger import Ledger

TIERS = st.sampled_from(list(Tier))
ENTRIES = st.sampled_from(["weights", "page", "workspace", "buffer"])


class LedgerAgainstADict(RuleBasedStateMachine):
    """Adds and removes at random; the model is one dict of entries a tier."""

    @initialize(device=st.integers(0, 60), host=st.integers(0, 60), disk=st.integers(0, 60))
    def start(self, device: int, host: int, disk: int) -> None:
        self.budget = Budget(device_bytes=device, host_bytes=host, disk_bytes=disk)
        self.ledger = Ledger(self.budget)
        self.model: dict[Tier, dict[str, int]] = {tier: {} for tier in Tier}
        self.peak = dict.fromkeys(Tier, 0)

    @rule(tier=TIERS, entry=ENTRIES, nbytes=st.integers(0, 40))
    def add(self, tier: Tier, entry: str, nbytes: int) -> None:
        entries = self.model[tier]
        if entry in entries:
            with pytest.raises(KeyError, match="already"):
                self.ledger.add(tier, entry, nbytes)
        elif sum(entries.values()) + nbytes > self.budget[tier]:
            with pytest.raises(DoesNotFitError, match=f"{entry} needs .* of {tier}, but only"):
                self.ledger.add(tier, entry, nbytes)
        else:
            self.ledger.add(tier, entry, nbytes)
            entries[entry] = nbytes
            self.peak[tier] = max(self.peak[tier], sum(entries.values()))

    @rule(tier=TIERS, entry=ENTRIES)
    def remove(self, tier: Tier, entry: str) -> None:
        if entry in self.model[tier]:
            self.ledger.remove(tier, entry)
            del self.model[tier][entry]
        else:
            with pytest.raises(KeyError):
                self.ledger.remove(tier, entry)

    @precondition(lambda self: any(self.model.values()))
    @rule()
    def remove_all(self) -> None:
        for tier in Tier:
            for entry in list(self.model[tier]):
                self.ledger.remove(tier, entry)
            self.model[tier].clear()
        assert all(nbytes == 0 for nbytes in self.ledger.live.values())

    @invariant()
    def agrees(self) -> None:
        for tier in Tier:
            live = sum(self.model[tier].values())
            assert self.ledger.live[tier] == live <= self.budget[tier]
            assert self.ledger.free(tier) == self.budget[tier] - live
            assert self.ledger.residents(tier) == self.model[tier]
            assert self.ledger.peak[tier] == self.peak[tier]


TestLedgerAgainstADict = LedgerAgainstADict.TestCase
TestLedgerAgainstADict.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_refused_entry_leaves_the_ledger_as_it_was_and_says_both_figures() -> None:
    ledger = Ledger(Budget(device_bytes=100, host_bytes=0, disk_bytes=0))
    ledger.add(Tier.DEVICE, "weights", 60)
    with pytest.raises(DoesNotFitError) as raised:
        ledger.add(Tier.DEVICE, "page", 41)
    assert str(raised.value) == "page needs 41 B of device, but only 40 B of 100 B are free"
    assert (ledger.live[Tier.DEVICE], ledger.peak[Tier.DEVICE]) == (60, 60)
    ledger.add(Tier.DEVICE, "page", 40)


def test_what_residents_returns_is_a_copy() -> None:
    ledger = Ledger(Budget(device_bytes=100, host_bytes=0, disk_bytes=0))
    ledger.add(Tier.DEVICE, "weights", 60)
    ledger.residents(Tier.DEVICE).clear()
    assert ledger.residents(Tier.DEVICE) == {"weights": 60}
