"""Qwen3.6-27B at a million tokens and more: what a step would need and take, without its weights.

engine simulate qwen3_6_27b --hardware h200-sxm --budget host=2TB,disk=8TB
engine simulate qwen3_6_27b --hardware h20 --budget host=2TB,disk=8TB --set prompt_tokens=2088960

The model was made for 262,144 positions: set yarn_factor for longer contexts that are to mean something.
The architecture is written out below, so nothing is downloaded; tokens are random. All parameters are trained, in
bfloat16 with float32 gradients, moments and masters, by layer spans. With ``policy`` a checkpoint is trained instead.
"""

from __future__ import annotations

import random
from typing import Any

from transformers import AutoConfig

from engine import Plan
from stages import DEFAULT_PAGE_TOKENS, find_policy, grpo_step, parse_dtype, parse_group, step_settings

ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
"""The text model of Qwen/Qwen3.6-27B as its model card and configuration give it (read in third-party copies)."""


def qwen3_6_27b(
    policy: str | None = None,
    prompt_tokens: int = 1_048_576,
    response_tokens: int = 8192,
    group_size: int = 8,
    yarn_factor: float | None = None,
    gradient: str = "exact",
    loss: str = "grpo",
    dtype: str = "bfloat16",
    learning_rate: float = 1e-6,
    temperature: float = 1.0,
    seed: int = 0,
    chunk_tokens: int | None = 8192,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    stored_inputs: int | None = 0,
    layer_spans: int | None = 4,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    state_tier: str = "auto",
) -> Plan:
    """One step over one random prompt with ``group_size`` random responses."""
    source = find_policy(AutoConfig.for_model(**ARCHITECTURE) if policy is None else policy)
    source = source if yarn_factor is None else source.with_yarn(yarn_factor)
    numbers, vocabulary = random.Random(seed), int(source.config.vocab_size)
    record = {
        "prompt": numbers.choices(range(vocabulary), k=prompt_tokens),
        "responses": [numbers.choices(range(vocabulary), k=response_tokens) for _ in range(group_size)],
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
    group = parse_group(record, where="qwen3_6_27b", tokenizer=None, vocab_size=vocabulary)
    return grpo_step(name="qwen3_6_27b", policy=source, groups=[group], settings=settings)
