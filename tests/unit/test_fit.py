"""What fits: the search over plans, held against planning every value, and what is said of the value beyond."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError, UsageError
from engine.fit import PATIENCE_S, Fitted, Fitter
from engine.fit_report import describe_fit
from engine.hardware import PROFILES
from engine.loader import PlanFile
from engine.plan import Choices, Cost, Plan, Stage, TensorSpec, Value
from engine.planner import forecast
from engine.units import KIB

LONGEST = 5000
ROOM = Budget(device_bytes=64 * KIB, host_bytes=100 * KIB, disk_bytes=0)
CPU = PROFILES["cpu"]


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


class Space:
    """A row or several at once: more of them need more workspace and take less time."""

    gradual = ("at_once",)
    hindrance = None

    def declares(self, choices: Choices) -> bool:
        return True

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        return Cost(), 1

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.ladders = {"at_once": (16, 8, 4, 2, 1)}

    def leanest(self) -> list[Choices]:
        return [{"at_once": 1}]

    def note_added(self, stage: Stage) -> None: ...

    def levers(self, stage: Stage) -> tuple[str, ...]:
        return ("at_once",)

    def lower(self, choices: Choices) -> Plan:
        """A Value of ``rows`` KiB is there while two stages run, of which one can do without it."""
        plan = Plan(name="rows", choices=choices, space=self)
        state = TensorSpec(shape=(self.rows, KIB), dtype="uint8")
        plan.value(Value(name="state", tensors={"t": state}, tiers=(Tier.DEVICE, Tier.HOST)))
        plan.add(Stage(name="write", kind="work", run=nothing, writes=("state",)))
        room, cost = choices["at_once"] * KIB, Cost(flops=10**9 // choices["at_once"])
        plan.add(Stage(name="work", kind="work", run=nothing, workspace_bytes=self.rows * KIB // 4 + room, cost=cost))
        plan.add(Stage(name="read", kind="work", run=nothing, reads=("state",), cost=Cost(flops=10**6)))
        return plan

    sketch = outline = lower


def rows(rows: int = 8, most: int | None = None, flag: bool = False, title: str = "rows") -> Plan:
    if not 0 < rows <= (most or LONGEST):
        raise UsageError(f"the text has {most or LONGEST} rows, not {rows}")
    return Space(rows).lower({"at_once": 16})


def fitter(budget: Budget = ROOM, **changes: Any) -> Fitter:
    given: dict[str, Any] = {"settings": {}, "say": lambda line: None, "build": rows, **changes}
    file = PlanFile(path=Path(inspect.getfile(rows)), build=given.pop("build"))
    return Fitter(file=file, plan=file.plan(given["settings"]), budget=budget, profile=CPU, **given)


def fits(number: int, budget: Budget) -> bool:
    try:
        forecast(rows(number), budget, CPU)
    except DoesNotFitError:
        return False
    return True


@pytest.mark.parametrize("device", [20, 33, 64])
@pytest.mark.parametrize("start", ["1", "8", "900"])
def test_the_largest_value_is_the_largest_of_planning_each(device: int, start: str) -> None:
    budget = replace(ROOM, device_bytes=device * KIB)
    found = fitter(budget, settings={"rows": start}).answer("rows")
    assert found.value == max(number for number in range(1, 200) if fits(number, budget))
    assert found.next_value == found.value + 1


def test_the_value_comes_with_the_fastest_choices_and_the_stage_that_has_no_room_beyond() -> None:
    budget = replace(ROOM, device_bytes=20 * KIB)
    found = fitter(budget).answer("rows")
    assert found.value == 20
    assert found.forecast is not None
    best = forecast(rows(found.value), budget, CPU)
    assert found.forecast.plan.choices == best.plan.choices == {"at_once": 8}
    assert found.forecast.makespan_s == best.makespan_s
    assert found.binding_stage == "write"
    assert found.limit.startswith("at rows=21: does not fit: stage write needs 21.00 KiB")


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
@pytest.mark.parametrize("number", [8, 40])
def test_the_smallest_budget_of_a_tier_works_and_a_thousandth_less_does_not(tier: Tier, number: int) -> None:
    small = replace(ROOM, device_bytes=45 * KIB)
    found = fitter(small, settings={"rows": str(number)}).answer(str(tier))
    assert found.value is not None
    assert fits(number, with_tier(small, tier, found.value))
    less = found.value - max(1, found.value // 1000)
    assert found.value == 0 or not fits(number, with_tier(small, tier, less))


def with_tier(budget: Budget, tier: Tier, nbytes: int) -> Budget:
    return replace(budget, **{f"{tier}_bytes": nbytes})


def test_the_smallest_device_budget_is_the_proved_one_where_the_other_tiers_have_room() -> None:
    found = fitter(settings={"rows": "40"}).answer("device")
    assert found.value == forecast(rows(40), ROOM, CPU).smallest_device_bytes
    assert found.next_value is None
    assert found.limit == "stage write needs it under all choices"


def test_a_tier_that_is_not_needed_has_the_smallest_budget_of_nothing() -> None:
    found = fitter().answer("disk")
    assert (found.value, found.limit) == (0, "none is needed")


def test_a_value_that_the_plan_refuses_ends_the_search_with_its_reason() -> None:
    found = fitter(settings={"most": "37"}).answer("rows")
    assert found.value == 37
    assert found.limit == "at rows=38: the text has 37 rows, not 38"


def test_a_parameter_without_a_default_begins_with_the_first_value_that_is_accepted() -> None:
    lines: list[str] = []
    found = fitter(say=lines.append).answer("most")
    assert lines[0].startswith("most 8: fits")
    assert found.limit == "no larger value than 16777216 is tried"


def test_no_value_is_doubled_that_took_too_long_to_plan() -> None:
    clock = iter(range(0, 10_000, int(PATIENCE_S) + 1)).__next__
    found = fitter(clock=clock).answer("rows")
    assert (found.value, found.next_value) == (8, None)
    assert found.limit.startswith("larger values were not tried: making the plan at 8 took 61.0 s")


def test_where_nothing_fits_there_is_no_value_and_a_reason() -> None:
    tight = Budget(device_bytes=KIB, host_bytes=0, disk_bytes=0)
    found = fitter(tight, settings={"rows": "40"}).answer("rows")
    assert (found.value, found.forecast) == (None, None)
    assert found.limit.startswith("at rows=1: does not fit")
    no_host = fitter(tight, settings={"rows": "40"}).answer("host")
    assert no_host.value is None
    assert no_host.limit.startswith("does not fit: stage write needs 40.00 KiB")


@pytest.mark.parametrize(("name", "why"), [("flag", "is not a whole number"), ("nothing", "is not known")])
def test_a_name_that_can_not_be_varied_is_refused_with_those_that_can(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--vary {name}: {why} .* what can be varied is rows, most, device, host"):
        fitter().check(["rows", name])


def test_the_usual_questions_are_those_that_the_plan_can_answer() -> None:
    def group(prompt_tokens: int = 3, seed: int = 0) -> Plan:
        return rows(prompt_tokens)

    assert fitter(build=group).usual_names() == ["prompt_tokens", "device", "host", "disk"]


def test_the_text_has_a_row_and_a_reason_for_every_answer() -> None:
    asked = fitter(replace(ROOM, device_bytes=20 * KIB))
    nowhere = Fitted(name="host", value=None, forecast=None, limit="why", next_value=None, binding_stage=None)
    lines = describe_fit("rows", asked.budget, [asked.answer("rows"), asked.answer("device"), nowhere]).splitlines()
    assert lines[0] == "plan rows, budget device 20.00 KiB, host 100.00 KiB, disk 0 B"
    assert [line.split()[:3] for line in lines[2:4]] == [["largest", "rows", "20"], ["smallest", "device", "8.00"]]
    assert lines[4].split() == ["smallest", "host", "nothing", "fits", "-", "-", "-", "-"]
    assert lines[5].startswith("rows: with at_once 8; at rows=21: does not fit")
    assert lines[6] == "device: 8192 bytes; with at_once 4; stage write needs it under all choices"
    assert lines[7] == "host: why"


def test_every_value_that_is_tried_is_told() -> None:
    lines: list[str] = []
    say: Callable[[str], None] = lines.append
    fitter(replace(ROOM, device_bytes=20 * KIB), say=say).answer("rows")
    assert [line.split(", ")[0] for line in lines[:3]] == [
        "rows 8: fits", "rows 16: fits", "rows 32: does not fit",
    ]  # fmt: skip
