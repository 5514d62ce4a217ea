"""The learning rate of every update: transformers' own schedules, with a warm-up that starts one update ahead."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from engine.errors import UsageError
from stages.learning_rate import learning_rate_at

PEAK = 3e-5


def theirs(name: str, updates: int, *, total: int, warmup: int, **options: Any) -> list[float]:
    """Return the rates that transformers gives for updates 0, 1, 2, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=options or None)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler without an optimizer's step is what we want here
        for _ in range(updates):
            rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
    return rates


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (7, 0), (10, 3), (10, 9), (100, 1)])
@pytest.mark.parametrize(
    ("schedule", "name"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
def test_after_the_warmup_it_is_transformers_and_during_it_one_update_ahead(
    schedule: str, name: str, total: int, warmup: int
) -> None:
    expected = theirs(name, total + 1, total=total, warmup=warmup)
    found = [learning_rate_at(u, total=total, peak=PEAK, warmup=warmup, schedule=schedule) for u in range(total)]
    assert found == pytest.approx(expected[1 : warmup + 1] + expected[warmup:total], rel=1e-12, abs=0.0)


def test_a_decay_to_a_part_of_the_peak_is_transformers() -> None:
    expected = theirs("cosine_with_min_lr", 20, total=20, warmup=0, min_lr_rate=0.1)
    found = [learning_rate_at(u, total=20, peak=PEAK, schedule="cosine", final_ratio=0.1) for u in range(20)]
    assert found == pytest.approx(expected, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final_ratio", [0.0, 0.25, 1.0])
def test_a_decay_never_rises_and_ends_above_its_final_ratio(schedule: str, final_ratio: float) -> None:
    rates = [
        learning_rate_at(u, total=50, peak=PEAK, warmup=5, schedule=schedule, final_ratio=final_ratio)
        for u in range(50)
    ]
    assert rates[:5] == pytest.approx([PEAK * part / 5 for part in range(1, 6)])
    assert all(later <= earlier for earlier, later in pairwise(rates[5:]))
    assert rates[5] == pytest.approx(PEAK, rel=1e-15)
    assert final_ratio * PEAK <= rates[-1]
    assert rates[-1] > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmup_to_the_end_ends_at_the_peak(schedule: str) -> None:
    assert learning_rate_at(9, total=10, peak=PEAK, warmup=10, schedule=schedule) == PEAK


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_that_is_shorter_than_its_warmup_ends_in_it(schedule: str) -> None:
    found = [learning_rate_at(u, total=3, peak=PEAK, warmup=10, schedule=schedule) for u in range(3)]
    assert found == pytest.approx([PEAK * 0.1, PEAK * 0.2, PEAK * 0.3])


def test_no_update_of_a_warmup_is_lost_at_a_rate_of_zero() -> None:
    assert learning_rate_at(0, total=100, peak=PEAK, warmup=10) == pytest.approx(PEAK / 10)
    assert learning_rate_at(9, total=100, peak=PEAK, warmup=10) == PEAK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "polynomial"}, "schedule='polynomial' is not known; choose one of constant, linear, cosine"),
        ({"peak": -1.0}, "learning_rate=-1.0"),
        ({"peak": math.nan}, "learning_rate=nan"),
        ({"total": 0}, "total=0"),
        ({"warmup": -1}, "warmup_updates=-1"),
        ({"final_ratio": 1.5, "schedule": "cosine"}, "final_ratio=1.5"),
        ({"final_ratio": 0.1}, "final_ratio=0.1 has no meaning for a constant learning rate"),
        ({"update": 10}, "update 10 is not one of the 10"),
        ({"update": -1}, "update -1 is not one of the 10"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"update": 0, "total": 10, "peak": PEAK, **changes}
    with pytest.raises(UsageError, match=message):
        learning_rate_at(options.pop("update"), **options)
