"""Clipping and AdamW are torch's own: a step's new weights against torch.optim.AdamW on the step's own gradient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from engine.errors import StageFailedError, UsageError
from stages import AdamWOptions, GrpoSettings, shard_layout
from tests.helpers import (
    Done,
    checkpoint_tensors,
    random_group,
    run_step,
    same_bits,
    save_policy,
    step_space,
    tiny_config,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
OPTIONS = {
    "clipped": AdamWOptions(learning_rate=1e-2, max_grad_norm=0.5),
    "never clipped": AdamWOptions(learning_rate=1e-2, max_grad_norm=1e9),
    "without clipping": AdamWOptions(learning_rate=1e-2, max_grad_norm=0.0),
    "all numbers of its own": AdamWOptions(
        learning_rate=3e-2, beta1=0.7, beta2=0.9, eps=1e-3, weight_decay=0.1, max_grad_norm=2.0
    ),
}


def policy_of(tmp_path: Path, dtype: torch.dtype, *, tied: bool = True) -> Path:
    return save_policy(tmp_path / "policy", tiny_config("qwen2", tie_word_embeddings=tied), dtype=dtype)


def step(policy: Path, run: Path, dtype: torch.dtype, options: AdamWOptions) -> Done:
    chosen = {"chunk_tokens": 16, "branches_at_once": 2, "head_rows": 16}
    settings = GrpoSettings(dtype=dtype, optimizer=options, fixed=chosen)
    return run_step(step_space(policy, [random_group(0, 9, [6, 11])], settings), run)


def torch_step(policy: Path, done: Done, options: AdamWOptions, wide: torch.dtype) -> tuple[float, dict[str, Any]]:
    """Return the norm and the new weights that torch gives for the step's gradient, on a copy in ``wide``."""
    hf = AutoModelForCausalLM.from_pretrained(policy, dtype=wide)
    for name, parameter in hf.named_parameters():
        parameter.grad = done.gradients[name].clone()
    norm = math.sqrt(math.fsum(done.gradients[name].double().square().sum().item() for name in done.gradients))
    if options.max_grad_norm:
        norm = clip_grad_norm_(hf.parameters(), options.max_grad_norm, foreach=False).item()
    torch.optim.AdamW(
        hf.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        foreach=False,
    ).step()
    return norm, dict(hf.named_parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_float64_the_new_weights_are_those_of_torch_to_twelve_digits(
    options: AdamWOptions, tied: bool, tmp_path: Path
) -> None:
    policy = policy_of(tmp_path, torch.float64, tied=tied)
    done = step(policy, tmp_path / "run", torch.float64, options)
    norm, expected = torch_step(policy, done, options, torch.float64)
    assert done.outcome.results["grad_norm"] == pytest.approx(norm, rel=1e-12)
    found = checkpoint_tensors(done.checkpoint)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-12, atol=1e-12)
    assert set(found) == set(expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_float32_they_are_those_of_torch_to_rounding(options: AdamWOptions, tmp_path: Path) -> None:
    policy = policy_of(tmp_path, torch.float32)
    done = step(policy, tmp_path / "run", torch.float32, options)
    norm, expected = torch_step(policy, done, options, torch.float32)
    assert done.outcome.results["grad_norm"] == pytest.approx(norm, rel=1e-6)
    before = checkpoint_tensors(policy)
    for name, tensor in checkpoint_tensors(done.checkpoint).items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-6, atol=1e-6 * options.learning_rate)
        assert not torch.equal(tensor, before[name])


def test_bfloat16_weights_are_updated_through_a_float32_master_and_rounded_once(tmp_path: Path) -> None:
    options = AdamWOptions(learning_rate=1e-2, weight_decay=0.01)
    policy = policy_of(tmp_path, torch.bfloat16)
    done = step(policy, tmp_path / "run", torch.bfloat16, options)
    _, expected = torch_step(policy, done, options, torch.float32)
    before = checkpoint_tensors(policy)
    for name, tensor in checkpoint_tensors(done.checkpoint).items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, expected[name].detach().to(torch.bfloat16)), name
        assert not torch.equal(tensor, before[name])


@pytest.mark.parametrize("elements", [16, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_parameters_change_no_bit(
    dtype: torch.dtype, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, options = policy_of(tmp_path, dtype), OPTIONS["all numbers of its own"]
    whole = step(policy, tmp_path / "whole", dtype, options)
    monkeypatch.setattr(shard_layout, "PIECE_ELEMENTS", elements)
    cut = step(policy, tmp_path / "cut", dtype, options)
    assert same_bits(checkpoint_tensors(whole.checkpoint), checkpoint_tensors(cut.checkpoint))


def test_a_tied_weight_is_updated_once_and_counts_once_in_the_norm(tmp_path: Path) -> None:
    options = AdamWOptions(learning_rate=1e-2)
    policy = policy_of(tmp_path, torch.float64)
    done = step(policy, tmp_path / "run", torch.float64, options)
    assert "lm_head.weight" not in done.gradients
    squares = sum(gradient.square().sum().item() for gradient in done.gradients.values())
    assert done.outcome.results["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-12)
    before, after = checkpoint_tensors(policy), checkpoint_tensors(done.checkpoint)
    moved = (after["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max().item()
    assert moved == pytest.approx(1e-2, rel=1e-3)


def test_weights_that_are_not_finite_are_called_that(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        hf.model.norm.weight[0] = math.inf
    hf.save_pretrained(policy)
    with pytest.raises((StageFailedError, UsageError), match="not finite"):
        step(policy, tmp_path / "run", torch.float32, AdamWOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", math.nan),
        ("beta1", 1.0),
        ("beta2", 1.5),
        ("eps", -1.0),
        ("weight_decay", math.inf),
        ("max_grad_norm", -1.0),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(UsageError, match=f"{name}={value!r}"):
        AdamWOptions(**options)
