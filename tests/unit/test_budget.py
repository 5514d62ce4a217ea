"""Budgets: what a person names is taken to the byte, the rest stays at the machine's defaults."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from engine.budget import Budget, Tier, default_budget, merge_budget, parse_budget, unlimited
from engine.errors import UsageError
from engine.units import GIB

DEFAULTS = Budget(device_bytes=100, host_bytes=200, disk_bytes=300)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, (100, 200, 300)),
        ("", (100, 200, 300)),
        ("device=8GiB", (8 * GIB, 200, 300)),
        ("disk=7,device=5", (5, 200, 7)),
        (" device = 1KiB , host=2KB ,", (1024, 2000, 300)),
    ],
)
def test_a_tier_that_is_named_takes_its_bytes_and_the_others_keep_their_defaults(
    text: str | None, expected: tuple[int, int, int]
) -> None:
    budget = parse_budget(text, DEFAULTS)
    assert tuple(budget[tier] for tier in Tier) == expected


@pytest.mark.parametrize("text", ["gpu=8GiB", "device", "device:8GiB", "8GiB", "=8GiB", "DEVICE=1"])
def test_what_names_no_tier_is_refused_with_the_tiers_that_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="is not one of device=, host=, disk= with a size such as 8GiB") as raised:
        parse_budget(text, DEFAULTS)
    assert repr(text) in str(raised.value)


def test_a_tier_named_twice_is_refused_and_not_decided_by_order() -> None:
    with pytest.raises(UsageError, match="names device twice"):
        parse_budget("device=8GiB,host=1GiB,device=9GiB", DEFAULTS)


@pytest.mark.parametrize("text", ["device=8 gigs", "host=", "disk=-1", "device=0"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text, DEFAULTS)


def test_merging_replaces_the_named_tiers_only() -> None:
    assert merge_budget({"host": 1}, DEFAULTS) == Budget(device_bytes=100, host_bytes=1, disk_bytes=300)
    assert merge_budget({}, DEFAULTS) == DEFAULTS


def test_the_default_is_half_of_the_memory_a_quarter_of_it_and_four_fifths_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    usage = type(shutil.disk_usage(tmp_path))(10_000, 5_000, 5_000)
    asked: list[Path] = []

    def disk_usage(path: Path) -> object:
        asked.append(path)
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    budget = default_budget(tmp_path / "not" / "there" / "yet")
    assert budget == Budget(device_bytes=2_048_000, host_bytes=1_024_000, disk_bytes=4_000)
    assert asked == [tmp_path]


def test_a_budget_is_written_with_units_and_given_as_integers() -> None:
    budget = Budget(device_bytes=GIB, host_bytes=1, disk_bytes=3 * GIB)
    assert str(budget) == "device 1.00 GiB, host 1 B, disk 3.00 GiB"
    assert budget.as_dict() == {"device": GIB, "host": 1, "disk": 3 * GIB}


def test_nothing_exceeds_the_unlimited_budget() -> None:
    assert all(unlimited()[tier] >= 2**60 for tier in Tier)


def test_host_and_disk_may_be_left_unused_and_the_device_may_not() -> None:
    budget = parse_budget("host=0,disk=0", unlimited())
    assert (budget.host_bytes, budget.disk_bytes) == (0, 0)
    with pytest.raises(UsageError, match="at least one byte"):
        parse_budget("device=0", unlimited())
