"""The planner over random plans and choices: the fastest that fits, and never slower with more."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.budget import UNLIMITED_BYTES, Budget
from engine.errors import DoesNotFitError
from engine.plan import Choices, Cost, Plan, Stage
from engine.planner import Planner
from tests.property.test_schedules import SECONDS, budgets, random_plans, total_bytes


@dataclass
class Scaled:
    """A plan whose odd and even stages trade workspace for time: twice the time at half the workspace, twice over."""

    plan: Plan
    ladders: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"even": (1, 2, 4), "odd": (1, 2, 4)})

    def leanest(self) -> list[Choices]:
        return [{"even": 4, "odd": 4}]

    def levers(self, stage: Stage) -> list[str]:
        return [self._choice(stage)]

    def _choice(self, stage: Stage) -> str:
        return "odd" if list(self.plan.stages).index(stage.name) % 2 else "even"

    def sketch(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def lower(self, choices: Choices) -> Plan:
        plan = Plan(name="scaled", choices=choices, space=self)
        for value in self.plan.values.values():
            plan.value(value)
        for stage in self.plan.stages.values():
            factor = choices[self._choice(stage)]
            cost = Cost(flops=stage.cost.flops * factor)
            plan.add(replace(stage, workspace_bytes=stage.workspace_bytes // factor, cost=cost))
        return plan

    def planner(self) -> Planner:
        return Planner(plan=self.lower({"even": 1, "odd": 1}), profile=SECONDS)


def seconds(space: Scaled, budget: Budget) -> float | None:
    try:
        return space.planner().forecast(budget).makespan_s
    except DoesNotFitError:
        return None


@given(data=st.data(), plan=random_plans(most_stages=12))
@settings(max_examples=40)
def test_a_bigger_budget_never_gives_a_slower_plan(data: st.DataObject, plan: Plan) -> None:
    space, budget = Scaled(plan), data.draw(budgets(plan))
    before = seconds(space, budget)
    assume(before is not None)
    more = st.one_of(st.just(0), st.integers(0, total_bytes(plan)))
    bigger = Budget(
        device_bytes=budget.device_bytes + data.draw(more),
        host_bytes=budget.host_bytes + data.draw(more),
        disk_bytes=budget.disk_bytes + data.draw(more),
    )
    after = seconds(space, bigger)
    assert before is not None
    assert after is not None
    assert after <= before * (1 + 1e-12)


@given(data=st.data(), plan=random_plans(most_stages=12))
@settings(max_examples=25)
def test_what_is_found_is_the_fastest_of_all_choices(data: st.DataObject, plan: Plan) -> None:
    space, budget = Scaled(plan), data.draw(budgets(plan))
    found = seconds(space, budget)
    each = []
    for even, odd in itertools.product((1, 2, 4), repeat=2):
        alone = replace(space.lower({"even": even, "odd": odd}), space=None)
        try:
            each.append(Planner(plan=alone, profile=SECONDS).forecast(budget).makespan_s)
        except DoesNotFitError:
            continue
    assert found == (min(each) if each else None)


@given(data=st.data(), plan=random_plans(most_stages=12))
@settings(max_examples=25)
def test_what_is_refused_for_its_device_bytes_fits_under_no_choice(data: st.DataObject, plan: Plan) -> None:
    space = Scaled(plan)
    smallest = space.planner().smallest[1]
    room = Budget(device_bytes=smallest, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    assert seconds(space, room) is not None
    below = replace(room, device_bytes=smallest - data.draw(st.integers(1, smallest)))
    for even, odd in itertools.product((1, 2, 4), repeat=2):
        alone = replace(space.lower({"even": even, "odd": odd}), space=None)
        try:
            Planner(plan=alone, profile=SECONDS).forecast(below)
        except DoesNotFitError:
            continue
        raise AssertionError(f"even {even}, odd {odd} fits into {below}")
