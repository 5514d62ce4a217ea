"""Runs of several updates equal the same done by dense autograd and torch's own AdamW; sampled steps are exact too.

The oracle (`tests.parity.dense_oracle`) evaluates whole sequences through Hugging Face's model; between updates its
parameters are changed by ``torch.optim.AdamW`` after ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.budget import Budget, Tier
from engine.context import StageContext
from engine.errors import RunDirectoryError
from engine.hardware import load_profile
from engine.plan import Stage
from engine.planner import Forecast, forecast
from engine.runtime import execute
from engine.schedule import device_floor
from models.policy import find_policy
from stages import (
    AdamWOptions,
    Group,
    GrpoSettings,
    GrpoSpace,
    LossConfig,
    Prompt,
    RolloutSettings,
    Sample,
    deal,
    grpo_run,
    read_rollouts,
)
from stages.audit import audit, max_rel_err
from tests.helpers import (
    Done,
    budget,
    checkpoint_tensors,
    one_thread,
    random_group,
    random_ids,
    run_plan,
    same_bits,
    save_policy,
    tiny_config,
)
from tests.parity import dense_oracle

OPTIONS = AdamWOptions(learning_rate=0.02, weight_decay=0.01, max_grad_norm=0.5)
LOSS = LossConfig(epsilon=0.05)


def as_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def dense_updates(
    policy: Path, steps: Sequence[Sequence[Group]], *, epochs: int, rates: Sequence[float]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights after all updates, and the loss of each."""
    hf = dense_oracle.load(policy, "eager")
    optimizer = torch.optim.AdamW(
        hf.parameters(), betas=(OPTIONS.beta1, OPTIONS.beta2), eps=OPTIONS.eps, weight_decay=OPTIONS.weight_decay
    )
    losses, remaining = [], iter(rates)
    for groups in steps:
        for epoch in range(epochs):
            optimizer.zero_grad()
            scored = [
                [dense_oracle.score(hf, group, response, 1.0) for response in group.responses] for group in groups
            ]
            if epoch == 0:
                groups = [
                    replace(
                        group,
                        responses=tuple(
                            replace(response, old_logprobs=tuple(item.logprobs.tolist()))
                            if response.old_logprobs is None
                            else response
                            for response, item in zip(group.responses, items, strict=True)
                        ),
                    )
                    for group, items in zip(groups, scored, strict=True)
                ]
            rows = [
                (replace(item, response=response), advantage)
                for group, items in zip(groups, scored, strict=True)
                for item, response, advantage in zip(
                    items, group.responses, dense_oracle.advantages(group, scale=True), strict=True
                )
            ]
            loss = dense_oracle.step_loss(rows, LOSS)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(hf.parameters(), OPTIONS.max_grad_norm)
            optimizer.param_groups[0]["lr"] = next(remaining)
            optimizer.step()
            losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in hf.named_parameters()}, losses


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_updates_equal_dense_autograd_and_torchs_adamw(family: str, epochs: int, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config(family, tie_word_embeddings=True), dtype=torch.float64)
    groups = [random_group(seed, 20 + 7 * seed, [5, 9, 1]) for seed in range(4)]
    steps = deal(groups, steps=2, groups_per_step=2)
    settings = GrpoSettings(
        dtype=torch.float64,
        page_tokens=8,
        loss=LOSS,
        optimizer=OPTIONS,
        epochs_per_step=epochs,
        schedule="linear",
        warmup_updates=1,
        fixed={"chunk_tokens": 16, "branches_at_once": 2, "head_rows": 4},
    )
    plan = grpo_run(name="updates", policy=str(policy), steps=steps, settings=settings)
    done = run_plan(plan, tmp_path / "run")
    lines = as_json_lines(done.run / "results" / "metrics.jsonl")
    total = 2 * epochs
    rates = [OPTIONS.learning_rate * (1 if update < 1 else (total - update) / (total - 1)) for update in range(total)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rates, rel=1e-12)
    weights, losses = dense_updates(policy, [list(step) for step in steps], epochs=epochs, rates=rates)  # type: ignore[arg-type]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-9, abs=1e-12)
    found = checkpoint_tensors(done.checkpoint)
    assert max_rel_err(found, {name: tensor for name, tensor in weights.items() if name in found}) <= 1e-10
    if epochs > 1:
        assert any(line["clip_fraction_low"] + line["clip_fraction_high"] > 0 for line in lines), "clipping never bound"
        assert all(line["ratio_min"] == line["ratio_max"] == 1.0 for line in lines if line["epoch"] == 0)


def test_bfloat16_weights_move_at_a_learning_rate_of_1e_6_because_their_masters_do(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"), dtype=torch.bfloat16)
    before = checkpoint_tensors(policy)
    # Adam moves a weight by about the learning rate, so 200 updates reach 2e-4. A bfloat16 number x has its neighbours
    # at up to 2^-7 |x|: of those with a half step of at most 1e-4, all but a few must have moved after 200 updates.
    near = {name: tensor.float().abs() * 2.0**-8 < 1e-4 for name, tensor in before.items()}
    num_near = sum(int(mask.sum()) for mask in near.values())
    moved = []
    for steps in (1, 200):
        settings = GrpoSettings(dtype=torch.bfloat16, optimizer=AdamWOptions(learning_rate=1e-6))
        groups = [random_group(0, 6, [3, 4])] * steps
        plan = grpo_run(name="bf16", policy=str(policy), steps=deal(groups, steps=steps), settings=settings)
        after = checkpoint_tensors(run_plan(plan, tmp_path / f"run{steps}").checkpoint)
        moved.append(sum(int((after[name] != before[name])[near[name]].sum()) for name in before))
    assert num_near > 500
    assert moved[0] < 0.1 * num_near, "one update is below the weights' own rounding"
    assert moved[1] > 0.7 * num_near, "many are not, if nothing of them is lost"


def vowels(sample: Sample) -> float:
    return sum(token % 5 == 0 for token in sample.token_ids) / len(sample.token_ids) + 0.01 * sample.token_ids[0]


def prompts_of(lengths: Sequence[int]) -> list[Prompt]:
    return [
        Prompt(token_ids=tuple(random_ids(random.Random(index), length)), data=index, source=f"prompt {index}")
        for index, length in enumerate(lengths)
    ]


def sampled_space(
    policy: Path, lengths: Sequence[int], *, dtype: torch.dtype = torch.float64, **more: Any
) -> GrpoSpace:
    rollout = RolloutSettings(reward=vowels, group_size=3, max_response_tokens=7, stop_token_ids=(4, 9))
    steps = deal(prompts_of(lengths), steps=more.pop("steps", 1), groups_per_step=more.pop("groups_per_step", None))
    defaults: dict[str, Any] = {"page_tokens": 8, "fixed": {"chunk_tokens": 16, "branches_at_once": 2, "head_rows": 4}}
    settings = GrpoSettings(dtype=dtype, optimizer=OPTIONS, **(defaults | more))
    return GrpoSpace(
        name="sampled",
        policy=find_policy(policy),
        steps=tuple(tuple(step) for step in steps),
        settings=settings,
        rollout=rollout,
    )


@pytest.mark.parametrize("lengths", [(1,), (30,), (25, 9)])
def test_the_gradient_of_a_sampled_step_equals_dense_autograd_on_what_was_sampled(
    lengths: tuple[int, ...], tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen2"))
    space = sampled_space(policy, lengths)
    assert audit(space, budget())["passed"]
    done = run_plan(space.lower(space.first()), tmp_path / "run")
    (line,) = as_json_lines(done.run / "results" / "metrics.jsonl")
    assert line["ratio_min"] == line["ratio_max"] == 1.0
    assert 0 <= line["sampling_drift_max"] <= 1e-10
    file = done.run / "results" / "rollouts" / "step00000.jsonl"
    groups = read_rollouts(file, tokenizer=None, vocab_size=61)
    rewards = [response.reward for group in groups for response in group.responses]
    assert line["reward_mean"] == pytest.approx(sum(r for r in rewards if r is not None) / len(rewards), rel=1e-12)
    _, expected = dense_oracle.gradient(policy, groups, LossConfig(), 1.0)
    assert max_rel_err(done.gradients, expected) <= 1e-10
    for group in groups:
        for response in group.responses:
            assert response.old_logprobs is not None
            scored = dense_oracle.score(dense_oracle.load(policy, "eager"), group, response, 1.0)
            assert list(response.old_logprobs) == pytest.approx(scored.logprobs.tolist(), rel=1e-10)


def test_a_run_that_samples_has_the_same_bits_within_any_budget(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    results = []
    with one_thread():
        for name, tight in (("wide", False), ("tight", True)):
            space = sampled_space(
                policy, (40, 33, 21), dtype=torch.float32, steps=2, groups_per_step=2, epochs_per_step=2
            )
            plan = space.lower(space.first())
            floor, _ = device_floor(plan)
            within = budget(device=floor, host=30_000) if tight else budget()
            done = run_plan(plan, tmp_path / name, within)
            assert done.outcome.measured_peak_bytes["device"] <= within.device_bytes
            results.append((done, sorted((done.run / "results" / "rollouts").iterdir())))
    (wide, wide_files), (tight_run, tight_files) = results
    assert [file.read_bytes() for file in wide_files] == [file.read_bytes() for file in tight_files]
    assert same_bits(checkpoint_tensors(wide.checkpoint), checkpoint_tensors(tight_run.checkpoint))
    assert any("disk" in route for route in tight_run.planned.moved_bytes), "nothing had to leave for the disk"


def test_measured_bytes_never_pass_the_plan_and_equal_it_where_every_response_is_at_its_longest(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    space = sampled_space(policy, (40, 33), steps=2, groups_per_step=1)
    space.rollout = replace(space.rollout, stop_token_ids=())  # type: ignore[type-var]
    done = run_plan(space.lower(space.first()), tmp_path / "run")
    assert done.outcome.measured_peak_bytes["device"] == done.planned.peak_bytes[Tier.DEVICE]


def test_going_on_from_a_checkpoint_and_its_optimizer_equals_one_run(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    groups = [random_group(seed, 15, [4, 6]) for seed in range(3)]
    settings = GrpoSettings(optimizer=OPTIONS, save_optimizer=True, checkpoint_every=1)

    def train(name: str, start: Path, steps: Sequence[Group], **more: Any) -> Path:
        dealt = deal(steps, steps=len(steps))
        plan = grpo_run(name="on", policy=str(start), steps=dealt, settings=replace(settings, **more))
        return run_plan(plan, tmp_path / name).run / "results"

    with one_thread():
        whole = train("whole", policy, groups)
        assert {path.name for path in whole.iterdir()} >= {
            "checkpoint-1", "checkpoint-2", "checkpoint", "optimizer-1.safetensors", "optimizer.safetensors",
        }  # fmt: skip
        first = train("first", policy, groups[:1])
        rest = train("rest", first / "checkpoint", groups[1:], optimizer_state=str(first / "optimizer.safetensors"))
    assert same_bits(checkpoint_tensors(first / "checkpoint"), checkpoint_tensors(whole / "checkpoint-1"))
    assert same_bits(checkpoint_tensors(rest / "checkpoint"), checkpoint_tensors(whole / "checkpoint"))
    assert (rest / "optimizer.safetensors").read_bytes() == (whole / "optimizer.safetensors").read_bytes()


def test_the_prediction_at_actual_sizes_is_what_is_measured(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama", vocab_size=400))
    rollout = RolloutSettings(
        reward=vowels, group_size=5, max_response_tokens=64, stop_token_ids=tuple(range(0, 400, 9))
    )
    plan = grpo_run(
        name="actual",
        policy=str(policy),
        steps=deal(prompts_of((5, 3)), steps=2),
        settings=GrpoSettings(page_tokens=8, optimizer=OPTIONS),
        rollout=rollout,
    )
    done = run_plan(plan, tmp_path / "run")
    actual, measured = done.outcome.actual_peak_bytes, done.outcome.measured_peak_bytes
    assert actual is not None
    assert actual[Tier.DEVICE] == measured["device"] < done.planned.peak_bytes[Tier.DEVICE]
    assert abs(actual[Tier.DISK] - measured["disk"]) < 4096  # what a checkpoint's small files take is an estimate
    assert done.outcome.as_dict()["actual_peak_bytes"] == {str(tier): nbytes for tier, nbytes in actual.items()}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_leaves_out_repeated_steps_and_has_the_same_device_floor(
    epochs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama", tie_word_embeddings=True))
    for lengths in ((20,), (20, 50), (50, 20, 7)):
        space = sampled_space(policy, lengths, dtype=dtype, steps=6, groups_per_step=1, epochs_per_step=epochs)
        for choices in (space.first(), *space.leanest()):
            whole, sketch = space.lower(choices), space.sketch(choices)
            assert len(sketch.stages) < len(whole.stages)
            assert device_floor(sketch)[0] == device_floor(whole)[0]


@pytest.mark.parametrize(
    "stage", ["rollout step1/group1/response2", "reward step1/group0", "loss step1", "metrics step2"]
)
def test_a_resumed_run_samples_and_rewards_nothing_twice_and_ends_with_the_same_bits(
    stage: str, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    calls: list[str] = []

    def reward(sample: Sample) -> float:
        calls.append(sample.place)
        return len(calls) * 0.37 % 1  # another one at every call

    def planned() -> Forecast:
        space = sampled_space(policy, (20, 11), dtype=torch.float32, steps=3, groups_per_step=2)
        space.rollout = replace(space.rollout, reward=reward)  # type: ignore[type-var]
        return forecast(space.lower(space.first()), budget(), load_profile("cpu"))

    with one_thread():
        execute(planned(), tmp_path / "whole")
        assert len(calls) == len(set(calls)) == 18
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            execute(planned(), tmp_path / "run", observers=[StopAt(stage)])
        execute(planned(), tmp_path / "run", again=True)
    assert len(calls) == len(set(calls)) == 18
    whole, run = (tmp_path / name / "results" for name in ("whole", "run"))
    assert same_bits(checkpoint_tensors(whole / "checkpoint"), checkpoint_tensors(run / "checkpoint"))
    for file in ("metrics.jsonl", *(f"rollouts/step0000{step}.jsonl" for step in range(3))):
        assert (whole / file).read_bytes() == (run / file).read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-9], "is damaged: it is not the file that the journal says was written"),
        (lambda data: data.replace(b"0", b"1", 1), "is damaged"),
        (lambda data: b"", "is damaged"),
    ],
)
def test_a_recorded_file_that_was_changed_is_refused_and_one_that_was_removed_is_made_again(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))

    def planned() -> Forecast:
        space = sampled_space(policy, (20,), dtype=torch.float32, steps=2, groups_per_step=1, checkpoint_every=1)
        return forecast(space.lower(space.first()), budget(), load_profile("cpu"))

    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        execute(planned(), run, observers=[StopAt("loss step1")])
    file = run / "results" / "rollouts" / "step00000.jsonl"
    data = file.read_bytes()
    file.write_bytes(damage(data))
    (run / "results" / "rollouts" / ".step00009.jsonl.1234abcd.partial").write_text("half")
    with pytest.raises(RunDirectoryError, match=message):
        execute(planned(), run, again=True)
    assert (run / "results" / "checkpoint-1" / "config.json").is_file(), "nothing that was finished is lost"
    file.unlink()
    execute(planned(), run, again=True)
    assert file.read_bytes() == data
    assert not [path for path in run.rglob("*") if path.name.endswith(".partial")]


def test_a_step_of_given_groups_has_no_metrics_of_the_sampled_step_before_it(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    steps: list[list[Group | Prompt]] = [
        [*prompts_of((20,))],
        [random_group(1, 15, [4, 6])],
        [*prompts_of((9,)), random_group(2, 12, [3, 5])],
    ]
    plan = grpo_run(
        name="mixed",
        policy=str(policy),
        steps=steps,
        settings=GrpoSettings(dtype=torch.float64, page_tokens=8, optimizer=OPTIONS),
        rollout=RolloutSettings(reward=vowels, group_size=3, max_response_tokens=7),
    )
    done = run_plan(plan, tmp_path / "run")
    sampled, given_only, mixed = as_json_lines(done.run / "results" / "metrics.jsonl")
    assert {"reward_mean", "response_tokens_mean", "sampling_drift_max"} <= set(sampled)
    assert not {"reward_mean", "response_tokens_mean", "sampling_drift_max"} & set(given_only)
    assert (given_only["responses"], mixed["responses"]) == (2, 5)
    assert mixed["reward_mean"] != sampled["reward_mean"]


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo"])
def test_a_sampled_step_with_any_loss_passes_its_audit_also_where_responses_are_cut_into_chunks(
    loss: str, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen3"))
    fixed = {"chunk_tokens": 4, "branches_at_once": 2, "head_rows": 3}
    space = sampled_space(policy, (19, 6), loss=LossConfig(loss=loss, entropy_bonus=0.1), fixed=fixed)
    report = audit(space, budget())
    assert report["passed"], report


@dataclass
class StopAt:
    """Interrupts a run before a stage."""

    stage: str

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        if stage.name == self.stage:
            raise KeyboardInterrupt

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        pass


@pytest.mark.parametrize(("limit", "told"), [(26, False), (25, True)])
def test_sequences_longer_than_the_policys_positions_are_told(limit: int, told: bool, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama", max_position_embeddings=limit))
    space = sampled_space(policy, (20,))  # 19 tokens of the prompt's own, then its last one and 6 of a response
    notes = [note for note in space.lower(space.first()).notes if "max_position_embeddings" in note]
    assert bool(notes) is told
    assert not told or "up to 26 tokens are longer than the 25 positions" in notes[0]


def test_two_sampled_runs_one_after_the_other_end_with_the_bits_of_one(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))

    def train(name: str, start: Path, steps: int, first_step: int, **more: Any) -> Path:
        dealt = deal(prompts_of((12, 7, 9)), steps=steps, groups_per_step=2, first_step=first_step)
        settings = GrpoSettings(optimizer=OPTIONS, save_optimizer=True, first_step=first_step, page_tokens=8, **more)
        rollout = RolloutSettings(reward=vowels, group_size=3, max_response_tokens=5)
        plan = grpo_run(name="on", policy=str(start), steps=dealt, settings=settings, rollout=rollout)
        return run_plan(plan, tmp_path / name).run / "results"

    with one_thread():
        whole = train("whole", policy, 3, 0)
        first = train("first", policy, 1, 0)
        rest = train("rest", first / "checkpoint", 2, 1, optimizer_state=str(first / "optimizer.safetensors"))
    assert same_bits(checkpoint_tensors(rest / "checkpoint"), checkpoint_tensors(whole / "checkpoint"))
    assert as_json_lines(first / "metrics.jsonl") + as_json_lines(rest / "metrics.jsonl") == as_json_lines(
        whole / "metrics.jsonl"
    )


@st.composite
def sampled_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a small sampled run: model, prompts, steps, epochs, choices, pages, dtype, and how tight its budget is."""
    return {
        "family": draw(st.sampled_from(["llama", "qwen3"])),
        "tied": draw(st.booleans()),
        "lengths": draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)),
        "steps": draw(st.integers(1, 2)),
        "epochs_per_step": draw(st.integers(1, 2)),
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "page_tokens": draw(st.sampled_from([4, 16, 64])),
        "gradient": draw(st.sampled_from(["exact", "exact", "stop-prompt"])),
        "fixed": {
            "chunk_tokens": draw(st.integers(3, 40)),
            "branches_at_once": draw(st.integers(1, 4)),
            "head_rows": draw(st.integers(1, 20)),
        },
        "spare_bytes": draw(st.sampled_from([0, 20_000, 200_000])),
        "host_bytes": draw(st.sampled_from([40_000, 1 << 30])),
    }


@given(drawn=sampled_runs())
@hypothesis_settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_sampled_run_keeps_its_budget_is_measured_as_predicted_and_has_the_bits_of_a_roomy_one(
    drawn: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    config = tiny_config(drawn["family"], tie_word_embeddings=drawn["tied"])
    policy = save_policy(folder / "policy", config, dtype=drawn["dtype"])
    names = ("steps", "epochs_per_step", "dtype", "page_tokens", "gradient", "fixed")

    def run(name: str, within: Budget | None) -> Done:
        space = sampled_space(policy, drawn["lengths"], groups_per_step=1, **{key: drawn[key] for key in names})
        return run_plan(space.lower(space.first()), folder / name, within)

    with one_thread():
        roomy = run("roomy", None)
        floor = roomy.planned.smallest_device_bytes
        tight = run("tight", budget(device=floor + drawn["spare_bytes"], host=drawn["host_bytes"]))
    for done in (roomy, tight):
        actual, measured = done.outcome.actual_peak_bytes, done.outcome.measured_peak_bytes
        assert actual is not None
        for tier in (Tier.DEVICE, Tier.HOST):
            assert measured[tier] == actual[tier] <= done.planned.peak_bytes[tier] <= done.planned.budget[tier]
        assert measured["disk"] <= done.planned.peak_bytes[Tier.DISK]
    files = [sorted((done.run / "results" / "rollouts").iterdir()) for done in (roomy, tight)]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
    assert same_bits(checkpoint_tensors(roomy.checkpoint), checkpoint_tensors(tight.checkpoint))
    lines = as_json_lines(tight.run / "results" / "metrics.jsonl")
    assert all(line["ratio_min"] == line["ratio_max"] == 1.0 for line in lines if line["epoch"] == 0)


@pytest.mark.parametrize("write", [1, 2, 3, 4])
@pytest.mark.parametrize("after_writing", [True, False])
def test_a_run_that_is_killed_as_it_writes_a_kept_file_goes_on_and_asks_nothing_twice(
    write: int, after_writing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    asked: list[tuple[str, float]] = []

    def reward(sample: Sample) -> float:
        asked.append((sample.place, len(asked) * 0.37 % 1))
        return asked[-1][1]

    def planned() -> Forecast:
        space = sampled_space(policy, (12, 7), dtype=torch.float32, steps=2, groups_per_step=1)
        space.rollout = replace(space.rollout, reward=reward)  # type: ignore[type-var]
        return forecast(space.lower(space.first()), budget(), load_profile("cpu"))

    keep, calls = StageContext.keep_file, []

    def killed(self: StageContext, path: str, data: bytes) -> None:
        calls.append(path)
        if len(calls) != write or after_writing:
            keep(self, path, data)
        if len(calls) == write:
            raise KeyboardInterrupt

    monkeypatch.setattr(StageContext, "keep_file", killed)
    with pytest.raises(KeyboardInterrupt):
        execute(planned(), tmp_path / "run")
    monkeypatch.setattr(StageContext, "keep_file", keep)
    execute(planned(), tmp_path / "run", again=True)
    twice = 3 if write % 2 == 0 and not after_writing else 0  # rewards that were never written are asked for again
    assert len(asked) == 6 + twice
    recorded = [as_json_lines(tmp_path / f"run/results/rollouts/step0000{step}.jsonl")[0] for step in (0, 1)]
    last = dict(asked)
    assert [reward for record in recorded for reward in record["rewards"]] == list(last.values())


def test_where_a_recorded_step_is_gone_the_steps_after_it_are_made_anew(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))

    def planned() -> Forecast:
        space = sampled_space(policy, (12, 7), dtype=torch.float32, steps=3, groups_per_step=1)
        space.rollout = replace(space.rollout, reward=lambda sample: random.random())  # type: ignore[type-var]
        return forecast(space.lower(space.first()), budget(), load_profile("cpu"))

    with pytest.raises(KeyboardInterrupt):
        execute(planned(), tmp_path / "run", observers=[StopAt("loss step2")])
    folder = tmp_path / "run" / "results" / "rollouts"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "step00001.jsonl").unlink()
    execute(planned(), tmp_path / "run", again=True)
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert [name for name in sorted(before) if before[name] != after[name]] == ["step00001.jsonl", "step00002.jsonl"]
    lines = as_json_lines(tmp_path / "run" / "results" / "metrics.jsonl")
    assert max(line["sampling_drift_max"] for line in lines) < 1e-4


def test_what_is_not_the_runs_own_among_its_kept_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    space = sampled_space(policy, (12,), dtype=torch.float32)
    planned = forecast(space.lower(space.first()), budget(), load_profile("cpu"))
    with pytest.raises(KeyboardInterrupt):
        execute(planned, tmp_path / "run", observers=[StopAt("loss step0")])
    folder, outside = tmp_path / "run" / "results" / "rollouts", tmp_path / "outside"
    folder.rename(outside)
    (outside / "precious").write_text("mine")
    folder.symlink_to(outside)
    with pytest.raises(RunDirectoryError, match="is not the folder that the run made"):
        execute(planned, tmp_path / "run", again=True)
    assert (outside / "precious").read_text() == "mine"
    folder.unlink()
    outside.rename(folder)
    file = folder / "step00000.jsonl"
    file.unlink()
    file.mkdir()
    with pytest.raises(RunDirectoryError, match="is not the file that the run wrote"):
        execute(planned, tmp_path / "run", again=True)
    file.rmdir()
    execute(planned, tmp_path / "run", again=True)
