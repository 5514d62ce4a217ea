"""A tiny model with recurrent layers beside attention (Qwen3.5's), random weights and random tokens: seconds anywhere.

engine execute tiny_hybrid
engine audit tiny_hybrid --set dtype=float64
"""

from __future__ import annotations

import random

from transformers import AutoConfig

from engine import Plan
from engine.errors import UsageError
from stages import DEFAULT_PAGE_TOKENS, find_policy, grpo_step, parse_dtype, parse_group, step_settings

VOCABULARY = 211


def tiny_hybrid(
    layers: int = 4,
    prompt_tokens: int = 600,
    group_size: int = 4,
    response_tokens: int = 48,
    gradient: str = "exact",
    loss: str = "grpo",
    dtype: str = "float32",
    learning_rate: float = 1e-3,
    temperature: float = 1.0,
    seed: int = 0,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    stored_inputs: int | None = None,
    layer_spans: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    state_tier: str = "auto",
) -> Plan:
    """One step of a model with hidden size 64: every fourth layer has attention, the others are gated delta nets."""
    for name, number in (("layers", layers), ("response_tokens", response_tokens)):
        if number < 1:
            raise UsageError(f"{name}={number} must be at least 1")
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    numbers = random.Random(seed)
    record = {
        "prompt": [numbers.randrange(VOCABULARY) for _ in range(prompt_tokens)],
        "responses": [
            [numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, response_tokens))]
            for _ in range(group_size)
        ],
        "rewards": [numbers.random() for _ in range(group_size)],
    }
    settings = step_settings(
        gradient=gradient,
        loss=loss,
        learning_rate=learning_rate,
        dtype=parse_dtype(dtype),
        temperature=temperature,
        seed=seed,
        page_tokens=page_tokens,
        state_tier=state_tier,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
        stored_inputs=stored_inputs,
        layer_spans=layer_spans,
    )
    group = parse_group(record, where="tiny_hybrid", tokenizer=None, vocab_size=VOCABULARY)
    return grpo_step(name="tiny_hybrid", policy=find_policy(config), groups=[group], settings=settings)
