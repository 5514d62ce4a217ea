"""Layer spans: a model that does not fit the device runs in parts, with the same bits, on every tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.budget import Budget, Tier
from engine.errors import UsageError
from engine.plan import Plan
from engine.schedule import device_floor, staging_need
from models.policy import find_policy
from stages import AdamWOptions, GrpoSettings, GrpoSpace, RolloutSettings, names
from stages.audit import max_rel_err
from stages.dense import dense_gradient
from stages.groups import Prompt
from tests.helpers import (
    Done,
    budget,
    checkpoint_tensors,
    one_thread,
    random_group,
    run_plan,
    same_bits,
    save_policy,
    step_space,
    tiny_config,
)

LAYERS = 4
CHOICES = {"chunk_tokens": 8, "branches_at_once": 2, "head_rows": 8, "stored_inputs": 1}
CHUNK_KINDS = ("prefill", "score", "replay", "sweep")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def config_of(*, tied: bool, vocabulary: int = 61, **changes: Any) -> PreTrainedConfig:
    options = {"num_hidden_layers": LAYERS, "tie_word_embeddings": tied, "vocab_size": vocabulary, **changes}
    return tiny_config("qwen3", **options)


def space_of(policy: Path | PreTrainedConfig, spans: int, *, vocabulary: int = 61, **changes: Any) -> GrpoSpace:
    fixed = {**CHOICES, "layer_spans": spans, **changes.pop("fixed", {})}
    options = AdamWOptions(learning_rate=1e-3)
    groups = [random_group(1, 30, [14, 5, 9], vocabulary), random_group(2, 17, [3, 4], vocabulary)]
    return step_space(policy, groups, GrpoSettings(page_tokens=8, optimizer=options, fixed=fixed, **changes))


def plan_of(policy: Path | PreTrainedConfig, spans: int, **changes: Any) -> Plan:
    space = space_of(policy, spans, **changes)
    return space.lower(space.first())


def tight(plan: Plan, tier: Tier) -> Budget:
    """Return a budget with the least of the device, and with the rest on ``tier``."""
    floor, _ = device_floor(plan)
    vectors = sum(v.nbytes for v in plan.values.values() if Tier.HOST in v.tiers and Tier.DISK not in v.tiers)
    return budget(device=floor) if tier is Tier.HOST else budget(device=floor, host=staging_need(plan) + vectors)


def is_measured_as_planned(done: Done) -> bool:
    stages = done.outcome.stage_peak_bytes
    assert {name: pair for name, pair in stages.items() if pair[1] > pair[0]} == {}
    exact = {name: pair for name, pair in stages.items() if name.split()[0] in CHUNK_KINDS}
    assert {name: pair for name, pair in exact.items() if pair[0] != pair[1]} == {}
    return done.outcome.measured_peak_bytes["host"] == done.planned.peak_bytes[Tier.HOST]


@pytest.mark.parametrize(
    ("dtype", "tied", "vocabulary"),
    [
        (torch.float64, True, 61),
        (torch.float32, True, 400),
        (torch.float32, False, 61),
        (torch.bfloat16, True, 400),
        (torch.bfloat16, False, 61),
    ],
    ids=str,
)
def test_a_model_in_spans_has_the_bits_of_a_whole_one_and_keeps_a_budget_that_it_does_not_fit(
    dtype: torch.dtype, tied: bool, vocabulary: int, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", config_of(tied=tied, vocabulary=vocabulary))
    options = {"dtype": dtype, "epochs_per_step": 2, "save_optimizer": True, "vocabulary": vocabulary}
    whole = run_plan(plan_of(policy, 1, **options), tmp_path / "whole")
    floors = [device_floor(whole.planned.plan)[0]]
    for spans, tier in ((2, Tier.HOST), (LAYERS, Tier.DISK)):
        plan = plan_of(policy, spans, **options)
        floors.append(device_floor(plan)[0])
        done = run_plan(plan, tmp_path / str(spans), tight(plan, tier))
        assert done.planned.moved_bytes  # weights, gradients and optimizer state came and went
        assert is_measured_as_planned(done)
        assert same_bits(done.gradients, whole.gradients)
        assert same_bits(checkpoint_tensors(done.checkpoint), checkpoint_tensors(whole.checkpoint))
        files = [Path(item.outcome.results["optimizer"]) for item in (done, whole)]
        assert files[0].read_bytes() == files[1].read_bytes()
        for key in ("loss", "grad_norm", "metrics"):
            assert done.outcome.results[key] == whole.outcome.results[key]
    assert floors[1] < 0.7 * floors[0]
    assert floors[2] <= floors[1]


@pytest.mark.parametrize("stored", [0, 1, 2])
@pytest.mark.parametrize("gradient", ["exact", "stop-prompt"])
def test_what_is_kept_for_the_backward_changes_no_bit_in_spans(gradient: str, stored: int, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", config_of(tied=True))
    options = {"gradient": gradient, "update_weights": False, "fixed": {"stored_inputs": stored}}
    whole, parts = (
        run_plan(plan, tmp_path / str(spans), tight(plan, Tier.DISK))
        for spans in (1, 3)
        for plan in [plan_of(policy, spans, **options)]
    )
    assert is_measured_as_planned(parts)
    assert same_bits(parts.gradients, whole.gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_a_model_in_spans_equals_dense_autograd(tied: bool, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", config_of(tied=tied))
    space = space_of(policy, LAYERS, dtype=torch.float64, update_weights=False)
    plan = space.lower(space.first())
    done = run_plan(plan, tmp_path / "run", tight(plan, Tier.HOST))
    groups = [group for group in space.steps[0] if not isinstance(group, Prompt)]
    _, reference = dense_gradient(space.policy, groups, space.settings)
    assert max_rel_err(done.gradients, reference) <= 1e-10


@pytest.mark.parametrize(
    ("dtype", "tied"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_random_weights_are_the_same_drawn_at_once_or_span_by_span(
    dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    config = config_of(tied=tied)
    done = [run_plan(plan_of(config, spans, dtype=dtype, seed=5), tmp_path / str(spans)) for spans in (1, 2, LAYERS)]
    for item in done[1:]:
        assert is_measured_as_planned(item)
        assert same_bits(checkpoint_tensors(item.checkpoint), checkpoint_tensors(done[0].checkpoint))


def test_hugging_face_loads_a_checkpoint_that_was_written_in_spans(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", config_of(tied=True), dtype=torch.bfloat16)
    done = run_plan(plan_of(policy, 2, dtype=torch.float32), tmp_path / "run")
    loader: Any = AutoModelForCausalLM
    hf, found = loader.from_pretrained(done.checkpoint, output_loading_info=True)
    assert not any(found.values())
    assert hf.dtype is torch.bfloat16
    assert same_bits(dict(hf.named_parameters()), checkpoint_tensors(done.checkpoint))
    assert {path.name for path in done.checkpoint.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_in_spans_goes_on_from_a_saved_optimizer_with_the_bits_of_a_whole_one(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", config_of(tied=True), dtype=dtype)
    first = run_plan(plan_of(policy, 2, dtype=dtype, save_optimizer=True), tmp_path / "first")
    state = str(first.outcome.results["optimizer"])
    done = [
        run_plan(plan_of(first.checkpoint, spans, dtype=dtype, optimizer_state=state), tmp_path / str(spans))
        for spans in (1, 2, LAYERS)
    ]
    for item in done[1:]:
        assert is_measured_as_planned(item)
        assert same_bits(checkpoint_tensors(item.checkpoint), checkpoint_tensors(done[0].checkpoint))


def test_every_span_has_at_least_a_layer_and_all_parameters_are_in_one_shard() -> None:
    for spans in range(1, LAYERS + 1):
        plan = plan_of(config_of(tied=True), spans)
        shards = [name for name in plan.values if name.startswith(f"{names.WEIGHTS}/")]
        assert len(shards) == (spans + 1 if spans > 1 else 0)
        assert f"prefill step0/group0/prompt/tokens0-8{'' if spans == 1 else f'/span{spans - 1}'}" in plan.stages


def refused(policy: Path | PreTrainedConfig, spans: int, **changes: Any) -> str:
    with pytest.raises(UsageError) as raised:
        plan_of(policy, spans, **changes)
    return str(raised.value)


def test_spans_that_cannot_be_are_refused_with_the_reason(tmp_path: Path) -> None:
    assert refused(config_of(tied=True), 5) == "layer_spans=5 is more than the 4 layers of the policy"
    policy = save_policy(tmp_path / "policy", config_of(tied=True))
    (policy / "model.safetensors").rename(policy / "other.safetensors")
    save_policy(tmp_path / "narrow", config_of(tied=True, hidden_size=16))
    (tmp_path / "narrow" / "model.safetensors").rename(policy / "other.safetensors")
    assert "its files have no model.embed_tokens.weight of the model's shape; set it to 1" in refused(policy, 2)
    prompts: Sequence[Prompt] = [Prompt(token_ids=(1, 2, 3), source="test")]
    rollout = RolloutSettings(reward=lambda sample: 0.0, group_size=2, max_response_tokens=3)
    space = GrpoSpace(
        name="test",
        policy=find_policy(config_of(tied=True)),
        steps=(tuple(prompts),),
        settings=GrpoSettings(fixed={"layer_spans": 2}),
        rollout=rollout,
    )
    with pytest.raises(UsageError, match="layer_spans=2 can't be: responses are sampled, and every token would need"):
        space.first()
