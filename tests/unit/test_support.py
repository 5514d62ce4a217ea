"""What can't be evaluated exactly is refused by name: from the configuration, before any weight; else by its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.errors import UnsupportedModelError
from models.policy import find_policy
from models.support import check_config
from stages import GrpoSettings, grpo_step
from tests.helpers import FAMILIES, random_group, randomise, run_step, step_space, tiny_config

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**SMALL, **changes})
    return config


def plan_for(config: PreTrainedConfig) -> None:
    """Build a plan, which loads no weights."""
    grpo_step(name="test", policy=find_policy(config), groups=[random_group(0, 5, [3, 2])], settings=GrpoSettings())


def refusal(config: PreTrainedConfig) -> str:
    """Return the message that planning refuses the configuration with."""
    with pytest.raises(UnsupportedModelError) as caught:
        plan_for(config)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_are_held_against_dense_autograd_are_accepted(family: str) -> None:
    check_config(tiny_config(family), torch.float32)


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "a sliding window of mistral": (config_of("mistral", sliding_window=16), "sliding window of 16 tokens"),
    "a sliding window of qwen2 in some layers": (
        config_of("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1),
        "sliding window of 16 tokens",
    ),
    "a sliding window of qwen3": (
        config_of("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0),
        "sliding window of 8 tokens",
    ),
    "dropout in attention": (config_of("llama", attention_dropout=0.1), "attention_dropout"),
    "an encoder-decoder": (AutoConfig.for_model("t5", d_model=32, num_layers=2, vocab_size=61), "encoder-decoder"),
    "dynamic rotary positions": (
        config_of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "'dynamic'",
    ),
    "longrope": (
        config_of(
            "llama",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        ),
        "'longrope'",
    ),
    "a mixture of experts, mixtral": (config_of("mixtral", num_local_experts=4), "mixture of experts"),
    "a mixture of experts, qwen3": (
        config_of("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        "mixture of experts",
    ),
    "a recurrent hybrid with experts": (
        config_of("qwen3_next", layer_types=["linear_attention", "full_attention"], num_experts=4),
        "mixture of experts",
    ),
    "recurrent layers of another kind": (
        config_of("llama", layer_types=["linear_attention", "full_attention"]),
        "linear_attention",
    ),
    "gemma2's alternating windows": (config_of("gemma2", sliding_window=16), "sliding window of 16 tokens"),
    "gpt2's residual dropout": (
        AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=61),
        "dropout",
    ),
}


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_before_any_weight_this_is_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    message = refusal(config)
    assert reason in message
    assert repr(config.model_type) in message


def test_all_reasons_are_named_at_once() -> None:
    message = refusal(config_of("mistral", sliding_window=16, attention_dropout=0.2))
    assert "sliding window" in message
    assert "dropout" in message


ACCEPTED: dict[str, PreTrainedConfig] = {
    "mistral without a window": config_of("mistral", sliding_window=None),
    "qwen2 with a window that is switched off": config_of("qwen2", use_sliding_window=False, sliding_window=16),
    "linear rotary scaling": config_of(
        "llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "yarn": config_of(
        "qwen3",
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
    ),
}


@pytest.mark.parametrize("config", ACCEPTED.values(), ids=ACCEPTED)
def test_what_does_not_depend_on_the_chunk_is_accepted(config: PreTrainedConfig) -> None:
    plan_for(config)


DIFFERENT_WALKS: dict[str, PreTrainedConfig] = {
    "granite's multipliers": config_of(
        "granite", embedding_multiplier=12.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=3.0
    ),
    "gemma2's soft caps": config_of("gemma2", layer_types=["full_attention"] * 2, attention_dropout=0.0),
    "gemma's scaled embeddings": config_of("gemma"),
    "cohere's logit scale": config_of("cohere", logit_scale=0.25),
    "gpt-neox's other modules": AutoConfig.for_model(
        "gpt_neox",
        **{**SMALL, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    ),
}


@pytest.mark.parametrize("config", DIFFERENT_WALKS.values(), ids=DIFFERENT_WALKS)
def test_a_model_that_does_something_between_its_modules_is_refused_and_not_trained_wrong(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    hf = AutoModelForCausalLM.from_config(config)
    randomise(hf, 0)
    hf.save_pretrained(tmp_path / "policy")
    with pytest.raises(UnsupportedModelError):
        run_step(
            step_space(tmp_path / "policy", [random_group(0, 5, [3, 2])], GrpoSettings(dtype=torch.float32)),
            tmp_path / "run",
        )
