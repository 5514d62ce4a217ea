"""What is added to a plan after its builder handed it over: where it runs, and that it is never lost."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import stage
from engine.__main__ import main
from engine.budget import Budget, unlimited
from engine.errors import PlanError
from engine.loader import find_plan
from engine.plan import Choices, Cost, Plan, Stage, Value, ValueKind
from engine.planner import Forecast, forecast
from engine.runtime import execute
from tests.helpers import budget
from tests.own_stages import (
    CPU,
    add_to,
    matrix,
    mix,
    noise,
    show,
    square_into,
    write_and_load,
)


@dataclass
class Chain:
    """A chain of ``links`` stages and an accumulator over it; its workspace follows the choice ``rows``."""

    noted: list[str] = field(default_factory=list)

    @property
    def ladders(self) -> dict[str, tuple[int, ...]]:
        return {"rows": (4, 2, 1)}

    def leanest(self) -> list[Choices]:
        return [{"rows": 1}]

    def note_added(self, stage: Stage) -> None:
        self.noted.append(stage.name)

    def levers(self, stage: Stage) -> list[str]:
        return ["rows"]

    hindrance = None

    def declares(self, choices: Choices) -> bool:
        return True

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        return Cost(), 1

    def lower(self, choices: Choices) -> Plan:
        rows = choices["rows"]
        if rows not in self.__dict__.setdefault("plans", {}):
            self.plans[rows] = self._build(rows)  # type: ignore[attr-defined]
        return self.plans[rows]  # type: ignore[attr-defined,no-any-return]

    gradual = ("rows",)

    def outline(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def sketch(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def _build(self, rows: int) -> Plan:
        plan = Plan(name="chain", choices={"rows": rows}, space=self)
        plan.value(Value(name="sum", tensors={"t": matrix(1, 4)}, kind=ValueKind.ACCUMULATOR))
        plan.value(Value(name=f"rows{rows}", tensors={"t": matrix(1, 4)}))
        plan.value(Value(name="sized", tensors={"t": matrix(rows, 4)}))
        for index in range(3):
            value = plan.value(Value(name=f"link{index}", tensors={"t": matrix(1, 4)})).name
            fill = _filler(value, index + 1.0)
            plan.add(Stage(name=f"make{index}", kind="make", run=fill, writes=(value,), workspace_bytes=1000 * rows))
        for index in range(3):
            add = _adder(f"link{index}")
            plan.add(Stage(name=f"sum{index}", kind="sum", run=add, reads=(f"link{index}",), updates=("sum",)))
        for name in (f"rows{rows}", "sized"):
            plan.add(Stage(name=f"write {name}", kind="end", run=_filler(name, 1.0), reads=("sum",), writes=(name,)))
        return plan


def _filler(name: str, number: float) -> Callable[[Any], None]:
    def fill(context: Any) -> None:
        context.tensors(name)["t"].fill_(number)

    return fill


def _adder(name: str) -> Callable[[Any], None]:
    def add(context: Any) -> None:
        context.tensors("sum")["t"].add_(context.tensors(name)["t"])

    return add


def chain() -> Plan:
    space = Chain()
    return space.lower({"rows": 4}).hand_over()


def test_the_other_lowerings_of_a_plan_are_told_of_what_is_added_to_it_and_not_of_what_was_built() -> None:
    space = Chain()
    plan = space.lower({"rows": 4})
    assert space.noted == []
    plan.hand_over()
    plan.add(Stage(name="mine", kind="mine", run=_adder("link0"), reads=("link0",), updates=("sum",)))
    assert space.noted == ["mine"]


def order(plan: Plan) -> list[str]:
    return [item.name for item in plan.ordered()]


def narrow(plan: Plan) -> Forecast:
    """Plan within a budget that the first choices break."""
    return forecast(plan, Budget(device_bytes=1500, host_bytes=10_000, disk_bytes=10_000), CPU)


def test_what_was_added_is_there_under_the_choices_that_a_budget_forces(tmp_path: Path) -> None:
    plan = chain()
    doubled = mix(plan, plan.find("sum"), plan.find("link1"), scale=2.0)
    show(plan, key="doubled", tensors=[doubled])
    planned = narrow(plan)
    assert planned.plan.choices == {"rows": 1}
    assert execute(planned, tmp_path / "run").results["metrics"] == {"doubled": [[14.0] * 4]}


def test_what_was_added_runs_as_soon_as_what_it_reads_is_there() -> None:
    plan = chain()
    show(plan, key="early", tensors=[plan.find("link0")], name="early")
    show(plan, key="late", tensors=[plan.find("sum")], name="late")
    show(plan, key="early too", tensors=[plan.find("link0")], name="early-too")
    expected = ["make0", "early", "early-too", "make1", "make2", "sum0", "sum1", "sum2", "late"]
    assert order(plan)[:9] == expected
    assert order(narrow(plan).plan)[:9] == expected


def test_what_was_added_and_waits_for_nothing_comes_right_before_its_first_reader() -> None:
    plan = chain()
    own = noise(plan, rows=1, columns=4, seed=0)
    mix(plan, plan.find("link2"), square_into(plan, own))
    assert order(plan)[:6] == ["make0", "make1", "make2", "noise", "square_into", "mix"]


def test_a_change_to_the_builders_own_accumulator_comes_before_its_readers(tmp_path: Path) -> None:
    plan = chain()
    add_to(plan, plan.find("sum"), plan.find("link0"))
    show(plan, key="sum", tensors=[plan.find("sum")])
    assert order(plan)[5:9] == ["sum2", "add_to", "show", "write rows4"]
    assert execute(narrow(plan), tmp_path / "run").results["metrics"] == {"sum": [[7.0] * 4]}


def test_additions_count_in_floor_and_smallest_budget() -> None:
    plan = chain()
    before = narrow(plan).smallest_device_bytes

    @stage(workspace_bytes=1300)
    def hungry(link: Any) -> None: ...

    hungry(plan, plan.find("link0"))
    planned = narrow(plan)
    assert before < planned.smallest_device_bytes == 1300 + 32
    assert planned.plan.choices == {"rows": 1}


def test_lowering_again_adds_nothing_twice_and_leaves_the_spaces_own_plans_alone() -> None:
    plan = chain()
    show(plan, key="k", tensors=[plan.find("link0")])
    once = plan.lowered({"rows": 1})
    assert len(once.stages) == len(plan.lowered({"rows": 1}).stages) == len(plan.stages)
    assert plan.lowered({"rows": 4}) is plan
    assert order(once.lowered({"rows": 4})) == order(plan)
    assert plan.space is not None
    assert "show" not in plan.space.lower({"rows": 1}).stages


def test_notes_hooks_and_taps_of_the_plan_are_carried_too() -> None:
    plan = chain()
    plan.notes.append("mind the gap")
    plan.hooks["audit"] = print
    lowered = plan.lowered({"rows": 2})
    assert (lowered.notes, lowered.hooks) == (["mind the gap"], {"audit": print})


@pytest.mark.parametrize(
    ("name", "trouble"), [("rows4", "does not have under rows=1"), ("sized", "has with another size under rows=1")]
)
def test_a_value_that_is_not_there_under_every_choice_is_refused_with_choices_and_line(name: str, trouble: str) -> None:
    plan = chain()
    show(plan, key="k", tensors=[plan.find(name)])
    with pytest.raises(PlanError) as raised:
        plan.lowered({"rows": 1})
    assert str(raised.value) == (
        f"stage 'show' uses Value {name!r} of plan 'chain' under rows=4, which the plan {trouble}; use Values that are "
        f"there under every choice, or fix the choices by hand ({plan.stages['show'].origin})"
    )


def changes_before(plan: Plan, names: Sequence[str]) -> dict[str, int]:
    """Return how often the variable was changed before each stage that uses it, if they run in this order."""
    changes, found = 0, {}
    for item in (plan.stages[name] for name in names):
        if "mine" in item.used:
            found[item.name] = changes
        changes += "mine" in item.updates
    return found


@given(st.randoms(use_true_random=False))
def test_random_additions_keep_their_order_under_every_choice(rng: random.Random) -> None:
    plan = chain()
    own: list[Value] = [plan.find(f"link{index}") for index in range(3)] + [plan.find("sum")]
    total = plan.variable("mine", matrix(1, 4))
    for number in range(rng.randint(1, 8)):
        match rng.choice(["noise", "mix", "add", "show"]):
            case "noise":
                own.append(noise(plan, rows=1, columns=4, seed=number))
            case "mix":
                own.append(mix(plan, rng.choice(own), rng.choice(own)))
            case "add":
                add_to(plan, total, rng.choice(own))
            case "show" if "add_to" in plan.stages:
                show(plan, key=f"{number}", tensors=[total, rng.choice(own)])
    if "add_to" not in plan.stages:
        add_to(plan, total, own[0])
    here, there = order(plan), order(plan.lowered({"rows": 1}))
    assert [name for name in here if "write" not in name] == [name for name in there if "write" not in name]
    assert sorted(here) == sorted(plan.stages)
    assert changes_before(plan, here) == changes_before(plan, list(plan.stages))


# Added to a GRPO plan


@stage(workspace_bytes=lambda gradients: 4 * max(spec.nbytes for spec in gradients.values()))
def square_sum(gradients: dict[str, torch.Tensor], report: Callable[[str, Any], None]) -> None:
    """Report the sum of all squares."""
    report("square_sum", math.fsum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def grpo_plan() -> Plan:
    plan = find_plan("tiny_dense").plan({"prompt_tokens": "300", "response_tokens": "16"})
    square_sum(plan, plan.find("step0/gradients"))
    return plan


def test_a_stage_added_to_a_grpo_plan_runs_under_every_budget_right_after_the_merge(tmp_path: Path) -> None:
    plan = grpo_plan()
    smallest = forecast(plan, unlimited(), CPU).smallest_device_bytes
    budgets = {"roomy": unlimited(), "tight": budget(device=smallest)}
    forecasts = {name: forecast(plan, within, CPU) for name, within in budgets.items()}
    assert forecasts["roomy"].plan.choices != forecasts["tight"].plan.choices
    for name, planned in forecasts.items():
        names = [item.name for item in planned.schedule.stages]
        assert names[names.index("square_sum") - 1] == "merge step0"
        outcome = execute(planned, tmp_path / name)
        assert math.sqrt(outcome.as_dict()["metrics"]["square_sum"]) == pytest.approx(outcome.results["grad_norm"])  # type: ignore[index]


def test_a_stage_added_to_a_grpo_plan_may_not_use_what_depends_on_the_choices() -> None:
    plan = grpo_plan()
    scores = next(value for name, value in plan.values.items() if name.endswith("/scores"))
    show(plan, key="scores", tensors=[scores])
    with pytest.raises(PlanError, match=r"stage 'show' uses Value '.*/scores' of plan 'tiny_dense' under .*head_rows="):
        forecast(plan, unlimited(), CPU)


# Resume


def test_a_run_that_was_stopped_for_its_bytes_resumes_once_more_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    top = """
    @stage(workspace_bytes=10)
    def total(left, report):
        report("total", (left + 1).sum())
    """
    write_and_load(tmp_path, "total(plan, make(plan))", top)
    file, run = tmp_path / "mine.py", str(tmp_path / "run")
    assert main(["execute", str(file), "--run", run]) == 5
    assert "declare workspace_bytes=20 for it" in capsys.readouterr().err
    file.write_text(file.read_text().replace("workspace_bytes=10", "workspace_bytes=20"))
    assert main(["resume", run]) == 0
    assert "total: 4" in capsys.readouterr().out


def test_a_run_does_not_resume_with_another_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_and_load(tmp_path, "total(plan)", "@stage\ndef total():\n    raise ValueError")
    file, run = tmp_path / "mine.py", str(tmp_path / "run")
    assert main(["execute", str(file), "--run", run]) == 5
    file.write_text(file.read_text().replace("raise ValueError", "pass"))
    assert main(["resume", run]) == 4
    assert "the plan is not the one that the run was started with: its stages differ" in capsys.readouterr().err
