"""The search for windows: against CP-SAT's optimum on small plans, within the budget, the same every time."""

from __future__ import annotations

import pytest

from engine.driver import drive
from engine.needs import needs_of
from engine.placer import Placer
from engine.plan import Plan
from engine.portfolio import Portfolio
from engine.schedule import best_in_order, best_placement, make_schedule
from engine.simulated import SimulatedMachine
from tests.mixes import PROFILE, budget_at, chain, mixture
from tests.optimum import optimum

PLANS = [chain(0, 10), chain(1, 12), mixture(0, 10), mixture(1, 10)]
WORST = 1.15
# The scheduler's time over the optimum's, at most.


def everything_bytes(plan: Plan) -> int:
    return needs_of(plan, plan.ordered()).everything_bytes


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.name))
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_a_small_plan_takes_little_longer_than_the_optimum_in_its_order(plan: Plan, share: float) -> None:
    placer = Placer(needs=needs_of(plan, plan.ordered()), profile=PROFILE)
    budget = budget_at(plan, share, everything_bytes(plan))
    _, seconds = best_in_order(placer, budget)
    best = optimum(plan, budget, PROFILE, free_order=False, time_limit_s=30)
    assert best is not None
    assert best.proved
    assert 0.998 * best.seconds <= seconds <= WORST * best.seconds


@pytest.mark.parametrize("number", range(4))
def test_a_smaller_plan_takes_little_longer_than_the_optimum_in_any_order(number: int) -> None:
    plan = mixture(number, 8)
    budget = budget_at(plan, 0.2, everything_bytes(plan))
    schedule = make_schedule(plan, budget, PROFILE)
    best = optimum(plan, budget, PROFILE, time_limit_s=30, hint=schedule)
    assert best is not None
    assert best.proved
    assert 0.998 * best.seconds <= schedule.seconds <= WORST * best.seconds


@pytest.mark.parametrize("plan", PLANS[1:3], ids=lambda plan: str(plan.name))
@pytest.mark.parametrize("free_order", [False, True])
def test_the_optimum_is_a_schedule_that_the_driver_accepts_and_the_clock_confirms(plan: Plan, free_order: bool) -> None:
    budget = budget_at(plan, 0.2, everything_bytes(plan))
    best = optimum(plan, budget, PROFILE, free_order=free_order, time_limit_s=30)
    assert best is not None
    machine = SimulatedMachine(plan, PROFILE)
    drive(plan, best.schedule(), budget, machine)
    assert machine.clock_s == pytest.approx(best.seconds, rel=5e-3)


def test_what_is_found_for_a_budget_does_not_depend_on_which_were_asked_for_before() -> None:
    plan = PLANS[1]
    fresh, asked = (Portfolio(plan=plan, profile=PROFILE) for _ in range(2))
    small, large = (budget_at(plan, share, everything_bytes(plan)) for share in (0.1, 0.5))
    best_placement(asked, large)
    assert best_placement(asked, small) == best_placement(fresh, small)
    assert best_placement(asked, large) == best_placement(fresh, large)
