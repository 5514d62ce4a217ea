"""The planner over random plans and choices: the fastest that fits, and never slower with more."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.budget import UNLIMITED_BYTES, Budget
from engine.errors import DoesNotFitError
from engine.plan import Choices, Cost, Plan, Stage
from engine.planner import Planner
from engine.schedule import device_floor
from tests.property.test_schedules import SECONDS, budgets, larger_budgets, random_plans


@dataclass
class Scaled:
    """A plan whose odd and even stages trade workspace for time.

    At ``1/value`` of the workspace they take ``factors`` of the time, which need not rise along a ladder. Where the
    choices are gradual, the leanest ones may lie beside their path.
    """

    plan: Plan
    factors: Mapping[int, float] = field(default_factory=lambda: {1: 1, 2: 2, 4: 4})
    ladders: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"even": (1, 2, 4), "odd": (1, 2, 4)})
    gradual: Sequence[str] = ()
    hindrance: str | None = None

    def declares(self, choices: Choices) -> bool:
        return True

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        flops = sum(self._flops(stage, choices) for stage in self.plan.stages.values())
        return Cost(flops=flops), len(self.plan.stages)

    def _flops(self, stage: Stage, choices: Choices) -> float:
        return stage.cost.flops * self.factors[choices[self._choice(stage)]]

    def leanest(self) -> list[Choices]:
        return [{"even": 4, "odd": 4}, {"even": 4, "odd": 1}]

    def note_added(self, stage: Stage) -> None: ...

    def levers(self, stage: Stage) -> list[str]:
        return [self._choice(stage)]

    def _choice(self, stage: Stage) -> str:
        return "odd" if list(self.plan.stages).index(stage.name) % 2 else "even"

    def outline(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def sketch(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def lower(self, choices: Choices) -> Plan:
        plan = Plan(name="scaled", choices=choices, space=self)
        for value in self.plan.values.values():
            plan.value(value)
        for stage in self.plan.stages.values():
            factor = choices[self._choice(stage)]
            cost = Cost(flops=self._flops(stage, choices))
            plan.add(replace(stage, workspace_bytes=stage.workspace_bytes // factor, cost=cost))
        return plan

    def planner(self) -> Planner:
        return Planner(plan=self.lower({"even": 1, "odd": 1}), profile=SECONDS)


def seconds(space: Scaled, budget: Budget) -> float | None:
    try:
        return space.planner().forecast(budget).makespan_s
    except DoesNotFitError:
        return None


FACTORS = st.lists(st.sampled_from((0.25, 1.0, 2.0, 3.0)), min_size=3, max_size=3).map(
    lambda found: dict(zip((1, 2, 4), found, strict=True))
)
GRADUAL = st.sampled_from([(), ("even", "odd")])


@given(data=st.data(), plan=random_plans(most_stages=12), factors=FACTORS, gradual=GRADUAL)
@settings(max_examples=40)
def test_a_bigger_budget_never_gives_a_slower_plan(
    data: st.DataObject, plan: Plan, factors: Mapping[int, float], gradual: Sequence[str]
) -> None:
    space, budget = Scaled(plan, factors=factors, gradual=gradual), data.draw(budgets(plan))
    before = seconds(space, budget)
    assume(before is not None)
    after = seconds(space, data.draw(larger_budgets(plan, budget)))
    assert before is not None
    assert after is not None
    assert after <= before * (1 + 1e-12)


@given(data=st.data(), plan=random_plans(most_stages=12), factors=FACTORS)
@settings(max_examples=25)
def test_what_is_found_is_the_fastest_of_all_choices(
    data: st.DataObject, plan: Plan, factors: Mapping[int, float]
) -> None:
    space, budget = Scaled(plan, factors=factors), data.draw(budgets(plan))
    found = seconds(space, budget)
    each = []
    for even, odd in itertools.product((1, 2, 4), repeat=2):
        alone = replace(space.planner(), fixed={"even": even, "odd": odd})
        try:
            each.append(alone.forecast(budget).makespan_s)
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


@given(data=st.data(), plan=random_plans(most_stages=12))
@settings(max_examples=25)
def test_a_refusal_on_host_or_disk_says_how_many_choices_were_tried(data: st.DataObject, plan: Plan) -> None:
    space = Scaled(plan)
    planner = space.planner()
    tight = Budget(device_bytes=planner.smallest[1] + data.draw(st.integers(0, 100)), host_bytes=0, disk_bytes=0)
    assume(seconds(space, tight) is None)
    fitting = [
        choices
        for choices in ({"even": even, "odd": odd} for even, odd in itertools.product((1, 2, 4), repeat=2))
        if device_floor(space.lower(choices))[0] <= tight.device_bytes
    ]
    assume(len(fitting) > 1)
    with pytest.raises(DoesNotFitError, match=f"{len(fitting) - 1} other choices"):
        planner.forecast(tight)
