"""What people read: the figures of a forecast and of a run, in words and columns."""

from __future__ import annotations

from typing import Any

import pytest

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.hardware import PROFILES
from engine.journal import StageCommit
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.planner import Forecast, Offer, forecast
from engine.report import describe_audit, describe_forecast, describe_outcome, describe_plan, spilled, table
from engine.runtime import Outcome
from engine.units import KIB, format_bytes


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def spilling(budget: Budget) -> Forecast:
    """A Value of one KiB makes room for a workspace and comes back."""
    plan = Plan(name="spilling", choices={"rows": 4}, notes=["group 0 carries no signal"])
    plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(KIB,), dtype="uint8")}))
    plan.value(
        Value(name="p", tensors={"t": TensorSpec(shape=(4, KIB), dtype="uint8")}, kind=ValueKind.ORDERED, keep=True)
    )
    stream = Stream(values=("p",), updates=True)
    plan.add(Stage(name="write", kind="work", run=nothing, writes=("v",)))
    plan.add(Stage(name="work", kind="work", run=nothing, streams=(stream,), workspace_bytes=KIB))
    plan.add(Stage(name="read", kind="work", run=nothing, reads=("v",)))
    return forecast(plan, budget, PROFILES["cpu"])


def small() -> Budget:
    return Budget(device_bytes=2 * KIB, host_bytes=UNLIMITED_BYTES, disk_bytes=0)


def outcome(**changes: Any) -> Outcome:
    figures: dict[str, Any] = {
        "results": {"loss": 0.5, "grad_norm": 2.0, "checkpoint": "runs/x/results/checkpoint"},
        "measured_peak_bytes": {"device": 2 * KIB, "host": 5 * KIB, "disk": 0},
        "commits": [],
        "wall_s": 1.25,
        "stages_run": 3,
        "rss_bytes": 3 * KIB,
    }
    return Outcome(**{**figures, **changes})


def test_a_table_has_its_first_column_to_the_left_and_the_others_to_the_right() -> None:
    assert table(["tier", "budget"], [["device", "1 B"], ["x", "1.00 GiB"]]) == (
        "tier      budget\ndevice       1 B\nx       1.00 GiB"
    )


def test_spilled_bytes_are_what_was_put_on_host_or_disk_and_not_what_came_back() -> None:
    assert spilled(spilling(small())) == {Tier.HOST: 5 * KIB, Tier.DISK: 0}
    assert spilled(spilling(unlimited())) == {Tier.HOST: 0, Tier.DISK: 0}


def test_a_forecast_says_peaks_choices_notes_binding_stage_and_smallest_budget() -> None:
    lines = describe_forecast(spilling(small()), []).splitlines()
    assert lines[0] == "note: group 0 carries no signal"
    assert lines[1].startswith("plan spilling: fits; 3 stages, about ")
    assert [line.split() for line in lines[3:6]] == [
        ["device", "2.00", "KiB", "2.00", "KiB"],
        ["host", "4194304.00", "TiB", "5.00", "KiB"],
        ["disk", "0", "B", "0", "B"],
    ]
    assert "choices: rows 4" in lines
    assert "the device peak is reached in stage work" in lines
    assert "smallest device budget: 2.00 KiB (2048 bytes)" in lines
    assert lines[-1] == "spilled: 5.00 KiB to host"


def test_a_forecast_without_spill_and_choices_says_so() -> None:
    result = spilling(unlimited())
    result.plan.choices = {}
    lines = describe_forecast(result, []).splitlines()
    assert "choices: none" in lines
    assert lines[-1] == "spilled: nothing"


def test_what_other_budgets_would_buy_is_a_table_with_the_choices_that_differ() -> None:
    result = spilling(small())
    mine = result.budget.device_bytes
    offers = [
        Offer(device_bytes=mine, seconds=4.0, choices={"rows": 4}),
        Offer(device_bytes=2 * mine, seconds=1.0, choices={"rows": 8}),
    ]
    header, first, second = describe_forecast(result, offers).splitlines()[-3:]
    assert header.split() == ["device", "time", "choices"]
    assert first.endswith("this one")
    assert second.startswith(format_bytes(2 * mine))
    assert second.endswith("rows 8")


def test_an_outcome_sets_measured_beside_predicted() -> None:
    lines = describe_outcome(spilling(small()), outcome(), "runs/x", {"lines": ["as published: 3.0"]}).splitlines()
    assert lines[0].split() == ["tier", "budget", "predicted", "measured", "measured", "/", "predicted"]
    assert [line.split()[-1] for line in lines[1:4]] == ["1.0000", "1.0000", "1.0000"]
    assert {"loss: 0.5", "grad norm: 2", "as published: 3.0", "checkpoint: runs/x/results/checkpoint"} <= set(lines)
    assert "took 1.2 s; resident memory of the process at most 3.00 KiB" in lines
    assert lines[-1].startswith("run: runs/x")


def test_an_outcome_begins_with_planned_and_measured_bytes_of_its_stages() -> None:
    planned, measured = ({"device": size, "host": 0, "disk": 0} for size in (2 * KIB, KIB))
    commit = StageCommit(stage="work", key="k", planned_peak_bytes=planned, measured_peak_bytes=measured, wall_s=0.5)
    lines = describe_outcome(spilling(small()), outcome(commits=[commit]), "runs/x", {}).splitlines()
    assert lines[0].split()[:3] == ["stages", "how", "many"]
    assert lines[1].split() == ["work", "1", "0.500", "2.00", "KiB", "/", "1.00", "KiB", "-", "-"]


def test_an_outcome_that_measured_where_nothing_was_predicted_shows_no_ratio() -> None:
    measured = outcome(measured_peak_bytes={"device": KIB, "host": 5 * KIB, "disk": 7}, results={})
    lines = describe_outcome(spilling(small()), measured, "runs/x", {}).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["0.5000", "1.0000", "-"]
    assert not any(line.startswith(("loss", "grad norm", "checkpoint")) for line in lines)


def test_a_plan_is_shown_stage_by_stage_with_what_each_waits_for() -> None:
    lines = describe_plan(spilling(unlimited()).plan).splitlines()
    assert lines[0] == "plan spilling: 3 stages, 2 Values"
    assert "read" in "\n".join(lines[2:6])  # the graph, which has tests of its own
    table_at = next(index for index, line in enumerate(lines) if line.startswith("stage "))
    assert [line.split() for line in lines[table_at + 1 :]] == [
        ["write", "0", "B", "0", "-"],
        ["work", "1.00", "KiB", "1", "-"],
        ["read", "0", "B", "0", "write"],
    ]


@pytest.mark.parametrize(("passed", "verdict"), [(True, "within the tolerance"), (False, "OUT OF the tolerance")])
def test_an_audit_says_its_errors_its_verdict_and_the_bias_of_stopping_at_the_prompt(
    passed: bool, verdict: str
) -> None:
    text = describe_audit(
        {
            "dtype": "float64",
            "max_rel_err": 1e-12,
            "l2_rel_err": 2e-13,
            "cosine": None,
            "tolerance": 1e-10,
            "passed": passed,
            "stop_prompt": {"cosine": 0.8, "l2_rel_err": 0.6},
        }
    )
    assert f"{verdict} of 1e-10" in text
    assert "max_rel_err  1.000e-12" in text
    assert "cosine       none (a gradient is zero)" in text
    assert "with the gradient stopped at the prompt: cosine 0.8, l2_rel_err 0.6" in text
