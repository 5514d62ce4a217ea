"""What a resume decides: the last attempt counts, the request comes back as it was, another plan is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.budget import unlimited
from engine.errors import RunDirectoryError, UsageError
from engine.hardware import PROFILES
from engine.journal import KeptFile, PlanRecord, RunFinished, StageCommit, StageIntent, read_journal
from engine.outputs import Outputs
from engine.plan import Plan, Stage, TensorSpec, Value
from engine.planner import forecast
from engine.recipe import plan_keys, recipe_keys
from engine.resume import RunRequest, check_same, kept_files, last_attempt, unfinished
from engine.run import RunDirectory
from engine.runtime import execute

RUN = Path("run")
FINISHED = RunFinished(results={"loss": 1.0})
REQUEST = RunRequest(
    plan="plan.py",
    settings=("layers=2", "loss=grpo"),
    device="cpu",
    hardware="cpu",
    outputs=Outputs(report="r.html", gradients="g.safetensors"),
    cwd="/somewhere",
)


def plan(config: int = 1, **settings: object) -> Plan:
    made = Plan(name="p", settings=settings)
    made.value(Value(name="v", tensors={"t": TensorSpec(shape=(4,), dtype="float32")}))
    made.add(Stage(name="s", kind="work", run=lambda context: None, writes=("v",), config={"config": config}))
    return made


def record(of: Plan, **changes: Any) -> PlanRecord:
    """The record that a run of the plan has in its journal."""
    return PlanRecord(
        plan=of.name,
        fingerprint=plan_keys(of).fingerprint,
        settings=dict(of.settings),
        choices={},
        budget_bytes={},
        code_version=changes.get("code_version", engine.CODE_VERSION),
        recipe=REQUEST.recipe(),
    )


def commit(stage: str) -> StageCommit:
    return StageCommit(stage=stage, key="", planned_peak_bytes={}, measured_peak_bytes={}, wall_s=0.0)


def test_a_run_hashes_its_recipe_once_and_its_journal_has_those_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, hashed = plan_keys(plan()), []

    def counted(stages: Iterable[Stage], code_version: str) -> dict[str, str]:
        hashed.append(code_version)
        return recipe_keys(stages, code_version)

    monkeypatch.setattr("engine.recipe.recipe_keys", counted)
    execute(forecast(plan(), unlimited(), PROFILES["cpu"]), tmp_path / "run")
    assert hashed == [engine.CODE_VERSION]
    records, _ = read_journal(RunDirectory.open(tmp_path / "run").journal_path)
    assert [item.fingerprint for item in records if isinstance(item, PlanRecord)] == [keys.fingerprint]
    assert {item.stage: item.key for item in records if isinstance(item, StageCommit)} == keys.by_stage


def test_what_came_before_the_last_plan_record_does_not_count() -> None:
    first, second = record(plan(1)), record(plan(2))
    attempt = last_attempt([first, commit("a"), commit("b"), second, StageIntent(stage="a", key=""), commit("a")])
    assert attempt is not None
    assert (attempt.plan, [item.stage for item in attempt.commits], attempt.results) == (second, ["a"], None)
    again = last_attempt([first, commit("a"), FINISHED, first])
    assert again is not None
    assert (again.commits, again.results) == ([], None)


def test_a_journal_without_a_plan_has_no_attempt_and_can_not_be_resumed() -> None:
    assert last_attempt([]) is None
    with pytest.raises(RunDirectoryError, match="run was interrupted before its plan was recorded; remove it"):
        unfinished([], RUN)


def test_a_finished_run_is_not_resumed_and_an_unfinished_one_is() -> None:
    assert unfinished([record(plan()), commit("s")], RUN) == record(plan())
    with pytest.raises(UsageError, match="run is finished; engine show run prints its results"):
        unfinished([record(plan()), commit("s"), FINISHED], RUN)


@pytest.mark.parametrize("outputs", [Outputs(), REQUEST.outputs, Outputs(trace="t", report="r", gradients="g")])
def test_a_request_comes_back_from_its_recipe_as_it_was(outputs: Outputs) -> None:
    request = replace(REQUEST, outputs=outputs)
    assert RunRequest.of_recipe(json.loads(json.dumps(request.recipe()))) == request


@pytest.mark.parametrize("recipe", [{}, {"plan": "p"}, {**REQUEST.recipe(), "set": "layers=2"}])
def test_a_run_without_a_recipe_says_that_it_can_not_be_built_again(recipe: Mapping[str, object]) -> None:
    with pytest.raises(RunDirectoryError, match="was not started by `engine execute`"):
        RunRequest.of_recipe(recipe)


def test_the_same_plan_is_resumed_with_its_choices() -> None:
    assert check_same(record(plan(size=(1, 2))), plan(size=(1, 2))) == {}


def test_another_plan_is_refused_with_the_settings_that_differ_or_its_stages() -> None:
    with pytest.raises(RunDirectoryError, match="started with: size differ; bring back what was changed"):
        check_same(record(plan(size=1, other=2)), plan(size=3, other=2))
    with pytest.raises(RunDirectoryError, match="started with: its stages differ"):
        check_same(record(plan(1)), plan(2))


def test_another_version_of_the_engine_is_refused() -> None:
    with pytest.raises(RunDirectoryError, match=r"made by version 0\.0, this is "):
        check_same(record(plan(), code_version="0.0"), plan())


def test_a_kept_file_may_be_any_of_its_records_in_any_attempt() -> None:
    files = [KeptFile(path=path, nbytes=nbytes, crc32c=7) for path, nbytes in (("b", 1), ("a", 2), ("b", 3))]
    found = kept_files([files[0], record(plan()), *files[1:]])
    assert list(found.items()) == [
        ("b", {(1, 7), (3, 7)}),
        ("a", {(2, 7)}),
    ]
