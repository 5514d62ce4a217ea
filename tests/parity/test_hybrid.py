"""Decoders with recurrent layers beside attention: where boundaries live changes no bit, bytes are the planned ones.

Their gradients are held against dense autograd with those of all families (`tests.parity.test_dense_gradient`), their
layers one by one in `tests.parity.test_gated_delta`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from engine.budget import Tier
from engine.device_kind import planning_for
from engine.errors import UsageError
from engine.plan import Plan
from engine.schedule import device_floor
from models.policy import find_policy
from stages import GrpoSettings, GrpoSpace
from stages.audit import max_rel_err
from tests.far_device import FAR, FarDevice
from tests.helpers import (
    Done,
    checkpoint_tensors,
    one_thread,
    random_group,
    randomise,
    run_plan,
    run_step,
    same_bits,
    save_policy,
    step_space,
    tiny_config,
    tiny_hybrid_config,
)
from tests.parity import dense_oracle
from tests.parity.test_invariants import CHOICES, budgets_of, settings_of

RECURRENT, ATTENTION = "linear_attention", "full_attention"
EDGE = re.compile("/edge/")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


def policy_of(folder: Path, kinds: Sequence[str]) -> Path:
    config = tiny_hybrid_config("qwen3_5_text", layer_types=list(kinds), num_hidden_layers=len(kinds))
    return save_policy(folder, config, seed=len(kinds))


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_of(tmp_path_factory.mktemp("policy") / "checkpoint", [RECURRENT, ATTENTION, RECURRENT])


def made(policy: Path, chosen: GrpoSettings, responses: Sequence[int] = (14, 25, 9, 1)) -> Plan:
    space = step_space(policy, [random_group(1, 70, list(responses))], chosen)
    return space.lower(space.first())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spans", [1, 3])
def test_neither_tier_nor_span_nor_what_is_kept_changes_a_bit_and_measured_bytes_are_the_planned_ones(
    spans: int, dtype: torch.dtype, policy: Path, tmp_path: Path
) -> None:
    done: list[Done] = []
    for tier in Tier:
        for stored in (0, 2):
            fixed = {**CHOICES, "chunk_tokens": 16, "stored_inputs": stored, "layer_spans": spans}
            plan = made(policy, settings_of(dtype, fixed=fixed, state_tier=str(tier)))
            done.append(run_plan(plan, tmp_path / f"{tier}{stored}"))
            assert {value.tiers for name, value in plan.values.items() if EDGE.search(name)} == {(tier,)}
    for item in done:
        assert same_bits(item.gradients, done[0].gradients)
        assert same_bits(checkpoint_tensors(item.checkpoint), checkpoint_tensors(done[0].checkpoint))
        chunks = [c for c in item.outcome.commits if c.stage.split()[0] in ("prefill", "score", "replay", "sweep")]
        assert [c.measured_peak_bytes["host"] for c in chunks] == [c.planned_peak_bytes["host"] for c in chunks]
        planned, measured = (
            max(bytes_of(c)["device"] for c in chunks)
            for bytes_of in (lambda c: c.planned_peak_bytes, lambda c: c.measured_peak_bytes)
        )
        assert measured == planned


def test_a_device_with_memory_of_its_own_gives_the_same_bits(policy: Path, tmp_path: Path) -> None:
    expected = run_plan(made(policy, settings_of()), tmp_path / "cpu")
    with planning_for(FAR):
        plan = made(policy, settings_of())
    for name, within in budgets_of(plan).items():
        done = run_plan(plan, tmp_path / name, within, FarDevice())
        assert same_bits(done.gradients, expected.gradients)
        assert done.outcome.measured_peak_bytes["device"] <= done.planned.peak_bytes[Tier.DEVICE]


def test_the_number_of_spans_changes_no_bit(policy: Path, tmp_path: Path) -> None:
    found = [
        run_plan(made(policy, settings_of(fixed={**CHOICES, "layer_spans": spans})), tmp_path / str(spans)).gradients
        for spans in (1, 2, 3)
    ]
    assert same_bits(found[0], found[1])
    assert same_bits(found[0], found[2])


@given(data=st.data())
@settings(max_examples=8, phases=[Phase.generate])
def test_any_order_of_layers_has_the_gradient_of_dense_autograd(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    kinds = data.draw(st.lists(st.sampled_from((RECURRENT, ATTENTION)), min_size=1, max_size=4))
    responses = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    group = random_group(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 40)), responses)
    fixed = {
        "chunk_tokens": data.draw(st.sampled_from((1, 2, 5, 8, 64))),
        "branches_at_once": data.draw(st.integers(1, 4)),
        "head_rows": 8,
        "stored_inputs": data.draw(st.integers(0, 2)),
        "layer_spans": data.draw(st.integers(1, len(kinds))),
    }
    chosen = settings_of(torch.float64, fixed=fixed)
    policy = policy_of(folder / "policy", kinds)
    space = step_space(policy, [group], chosen)
    plan = space.lower(space.first())
    within = data.draw(st.sampled_from(sorted(budgets_of(plan))))
    done = run_plan(plan, folder / "run", budgets_of(plan)[within])
    _, reference = dense_oracle.gradient(policy, [group], chosen.loss, 1.0)
    assert max_rel_err(done.gradients, reference) <= 1e-10


@pytest.mark.parametrize("spans", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [8, 16])
def test_an_outline_has_the_device_floor_of_the_whole_plan(spans: int, chunk_tokens: int, policy: Path) -> None:
    fixed = {**CHOICES, "chunk_tokens": chunk_tokens, "layer_spans": spans}
    space = step_space(policy, [random_group(1, 300, [14, 25, 9, 1])], settings_of(fixed=fixed))
    outline, whole = space.outline(space.first()), space.lower(space.first())
    assert device_floor(outline)[0] == device_floor(whole)[0]
    assert len(outline.stages) < len(whole.stages)


def test_the_smallest_device_budget_does_not_depend_on_the_prompt(policy: Path) -> None:
    spaces = (step_space(policy, [random_group(1, tokens, [14, 5])], settings_of()) for tokens in (200, 400))
    floors = [device_floor(space.lower(space.first())) for space in spaces]
    assert floors[0][0] == floors[1][0]


# Checkpoints with other parts, and longer contexts


def multimodal(folder: Path) -> Path:
    """Write a random checkpoint with a text model and a vision model, and return its directory."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    text = tiny_hybrid_config("qwen3_5_text", num_hidden_layers=3)
    config = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
    hf = Qwen3_5ForConditionalGeneration(config)
    randomise(hf, 0)
    hf.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("spans", [1, 3])
def test_the_text_model_of_a_multimodal_checkpoint_is_trained_and_the_rest_is_said_to_be_left_alone(
    spans: int, tmp_path: Path
) -> None:
    policy, group = multimodal(tmp_path / "policy"), random_group(1, 30, [14, 5])
    chosen = settings_of(torch.float64, fixed={**CHOICES, "layer_spans": spans})
    done = run_step(step_space(policy, [group], chosen), tmp_path / "run")
    _, reference = dense_oracle.gradient(policy, [group], chosen.loss, 1.0)
    assert max_rel_err(done.gradients, reference) <= 1e-10
    assert "left alone" in done.planned.plan.notes[0]
    again = AutoModelForCausalLM.from_pretrained(done.checkpoint)
    assert again.config.model_type == "qwen3_5_text"


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_yarn_is_evaluated_exactly_and_the_new_checkpoint_says_so(family: str, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config(family, max_position_embeddings=64))
    source, group = find_policy(policy).with_yarn(4.0), random_group(1, 90, [14, 5])
    chosen = settings_of(torch.float64)
    space = GrpoSpace(name="yarn", policy=source, steps=((group,),), settings=chosen)
    done = run_step(space, tmp_path / "run")
    source.config.save_pretrained(policy)  # the oracle reads the checkpoint's own
    _, reference = dense_oracle.gradient(policy, [group], chosen.loss, 1.0)
    assert max_rel_err(done.gradients, reference) <= 1e-10
    config = AutoConfig.from_pretrained(done.checkpoint)
    assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("yarn", 4.0)
    assert config.max_position_embeddings == 256
    _, plain = dense_oracle.gradient(
        save_policy(tmp_path / "plain", tiny_config(family, max_position_embeddings=64)), [group], chosen.loss, 1.0
    )
    assert max_rel_err(done.gradients, plain) > 1e-3


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan"), float("inf"), "4"])
def test_a_yarn_factor_that_is_none_is_refused(factor: Any, policy: Path) -> None:
    with pytest.raises(UsageError, match=r"yarn_factor=.* must be a number above 1"):
        find_policy(policy).with_yarn(factor)


def test_what_is_scaled_already_is_not_scaled_again(policy: Path) -> None:
    with pytest.raises(UsageError, match="has rope type 'yarn' already; leave yarn_factor out"):
        find_policy(policy).with_yarn(2).with_yarn(2)
