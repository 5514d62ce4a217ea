"""What is predicted is what is measured: shipped plans, and random steps under random budgets, on every tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.predicted_bytes import random_steps, shipped, table
from tests.helpers import one_thread


@pytest.fixture(autouse=True)
def _threads() -> Iterator[Any]:
    with one_thread():
        yield


def test_shipped_plans_take_the_bytes_that_were_predicted(tmp_path: Path) -> None:
    found = list(shipped(tmp_path, quickstart=False))
    assert len(found) >= 4
    assert all(item.agree for item in found), table(found)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_step_under_a_random_budget_takes_the_bytes_that_were_predicted(tmp_path: Path, seed: int) -> None:
    found = list(random_steps(tmp_path, 1, seed))
    assert all(item.agree for item in found), table(found)
