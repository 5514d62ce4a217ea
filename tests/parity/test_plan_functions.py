"""What functions of a plan may return in a sampled run, and what is refused with the line of the function."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import stage
from engine.errors import EngineError, StageFailedError, UsageError
from engine.hardware import load_profile
from engine.plan import Plan, Stage
from engine.planner import forecast
from engine.runtime import execute
from stages import GrpoSettings, Prompt, RolloutSettings, Sample, deal, find_policy, grpo_run
from tests.helpers import Done, budget, run_plan, save_policy, tiny_config

OK = pytest.mark.parametrize


def planned(policy: Path, **functions: Any) -> Plan:
    rollout = RolloutSettings(**{"reward": length, "group_size": 3, "max_response_tokens": 4, **functions})
    prompts = [Prompt(token_ids=(1, 2, 3))]
    settings = GrpoSettings(dtype=torch.float64, page_tokens=8)
    return grpo_run(
        name="f", policy=find_policy(policy), steps=deal(prompts, steps=1), settings=settings, rollout=rollout
    )


def length(sample: Sample) -> float:
    return float(len(sample.token_ids) + sample.response)


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("f") / "policy", tiny_config())


def failing(policy: Path, tmp_path: Path, **functions: Any) -> str:
    with pytest.raises(EngineError) as caught:
        run_plan(planned(policy, **functions), tmp_path / "run")
    assert isinstance(caught.value, StageFailedError)
    return str(caught.value)


def cancelled(sample: Sample) -> float:
    raise asyncio.CancelledError


@OK(
    ("reward", "message"),
    [
        (lambda sample: math.nan, "returned nan; return a finite number"),
        (lambda sample: None, "returned None; return a finite number"),
        (lambda sample: "1.5", "returned '1.5'; return a finite number"),
        (lambda sample: 10**400, "return a finite number"),
        (lambda sample: 1 / 0, "ZeroDivisionError: division by zero"),
        (cancelled, "CancelledError"),
        (lambda sample: exit(3), "SystemExit: 3"),
    ],
)
def test_a_reward_that_is_no_finite_number_stops_the_run_with_the_line(
    reward: Callable[[Sample], Any], message: str, policy: Path, tmp_path: Path
) -> None:
    text = failing(policy, tmp_path, reward=reward)
    assert message in text
    assert "test_plan_functions.py line" in text


@OK(
    ("given", "message"),
    [
        (None, "returned None for step 0, group 0; return a list with an entry for every response"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "return a list with an entry for every response"),
        ("123", "returned '123' for step 0, group 0; return a list"),
        ([1.0, 2.0], "returned 2 entries for 3 responses"),
        ([[1.0], 2.0, 3.0], "returned 1 numbers for 4 tokens"),
        ([1.0, math.inf, 3.0], "returned inf; return a finite number"),
    ],
)
def test_advantages_of_another_form_stop_the_run_with_the_line(
    given: Any, message: str, policy: Path, tmp_path: Path
) -> None:
    text = failing(policy, tmp_path, advantage=lambda samples, rewards: given, stop_token_ids=())
    assert message in text
    assert "test_plan_functions.py line" in text


def advantages_as(kind: Callable[[list[float]], Any]) -> Callable[[Sequence[Sample], Sequence[float]], Any]:
    def given(samples: Sequence[Sample], rewards: Sequence[float]) -> Any:
        return [kind([reward - 4.0] * len(sample.token_ids)) for sample, reward in zip(samples, rewards, strict=True)]

    return given


def test_numbers_may_be_numpys_or_torchs_and_large(policy: Path, tmp_path: Path) -> None:
    done: list[Done] = []
    kinds: list[Callable[[list[float]], Any]] = [list, np.array, torch.tensor]
    for number, kind in enumerate(kinds):
        plan = planned(policy, advantage=advantages_as(kind), workspace_bytes=4096)
        done.append(run_plan(plan, tmp_path / f"{number}"))
    assert len({item.outcome.results["loss"] for item in done}) == 1
    large = planned(
        policy, reward=lambda sample: (-1) ** sample.response * 1e200, advantage=lambda s, r: [1.0, -1.0, 0.5]
    )
    metrics = run_plan(large, tmp_path / "large").outcome.results["metrics"]
    assert metrics["reward_std"] == pytest.approx(1e200 * (8 / 9) ** 0.5)


def with_torch(sample: Sample) -> float:
    return float(torch.ones(1000).sum())


def test_a_reward_that_makes_tensors_says_how_many_bytes(policy: Path, tmp_path: Path) -> None:
    text = failing(policy, tmp_path, reward=with_torch)
    assert re.search(r"declare workspace_bytes=\d+ for it, or need less", text)
    assert "test_plan_functions.py line" in text
    run_plan(planned(policy, reward=with_torch, workspace_bytes=4096), tmp_path / "declared")


@stage(workspace_bytes=1 << 20)
def halve_in_place(weights: Any) -> None:
    with torch.no_grad():
        for parameter in weights.hf.parameters():
            parameter.mul_(0.5)


def test_a_stage_of_ones_own_that_only_reads_the_weights_may_not_change_them(policy: Path, tmp_path: Path) -> None:
    plan = planned(policy)
    halve_in_place(plan, plan.find("weights"))
    with pytest.raises(StageFailedError, match=r"changed weights in place, which it only reads"):
        run_plan(plan, tmp_path / "run")


@stage(workspace_bytes=64)
def count_answers(rollout: dict[str, torch.Tensor], report: Callable[[str, object], None]) -> None:
    answers = {tuple(row) for row in rollout["token_ids"].tolist()}
    report("distinct_answers", len(answers))


def test_reports_of_own_stages_stand_in_the_line_of_their_step(policy: Path, tmp_path: Path) -> None:
    prompts = [Prompt(token_ids=(1, 2, 3)), Prompt(token_ids=(5, 6))]
    plan = grpo_run(
        name="reports",
        policy=find_policy(policy),
        steps=deal(prompts, steps=3, groups_per_step=1),
        settings=GrpoSettings(page_tokens=8, epochs_per_step=2),
        rollout=RolloutSettings(reward=length, group_size=3, max_response_tokens=4),
    )
    for step in (0, 2):
        count_answers(plan, plan.find(f"step{step}/group0/rollout"))
    done = run_plan(plan, tmp_path / "run")
    lines = (done.run / "results" / "metrics.jsonl").read_text().splitlines()
    assert ["distinct_answers" in line for line in lines] == [True, False, False, False, True, False]


@stage(workspace_bytes=64)
def bad_report(rollout: dict[str, torch.Tensor], report: Callable[[str, object], None], *, kind: str) -> None:
    name, value = {
        "own": ("loss", 1.0),
        "twice": ("reward_mean", 1.0),
        "huge": ("a", 2**70),
        "surrogate": ("a", "\ud800"),
        "long": ("a", [0.5] * 200_000),
        "object": ("a", object()),
    }[kind]
    report(name, value)


@OK(
    ("kind", "message"),
    [
        ("own", "reports 'loss', a name that a line of metrics has"),
        ("twice", "'reward_mean' was reported, and the metrics have that name"),
        ("huge", "report numbers, text, lists and dicts"),
        ("surrogate", "report numbers, text, lists and dicts"),
        ("long", "bytes, more than the 16384 that a journal takes"),
        ("object", "report numbers, text, lists and dicts"),
    ],
)
def test_reports_that_the_journal_can_not_hold_are_refused_at_once(
    kind: str, message: str, policy: Path, tmp_path: Path
) -> None:
    plan = planned(policy)
    bad_report(plan, plan.find("step0/group0/rollout"), kind=kind)
    with pytest.raises(StageFailedError) as caught:
        run_plan(plan, tmp_path / "run")
    assert message in str(caught.value)


def test_a_plan_whose_settings_a_journal_can_not_hold_leaves_no_directory(tmp_path: Path) -> None:
    plan = Plan(name="p", settings={"x": "y" * (2 << 20)})
    plan.add(Stage(name="s", kind="s", run=lambda context: None))
    with pytest.raises(UsageError, match=r"PlanRecord takes \d+ bytes, a journal record at most"):
        execute(forecast(plan, budget(), load_profile("cpu")), tmp_path / "run")
    assert not (tmp_path / "run").exists()
