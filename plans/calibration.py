"""Steps that are made to be measured: random weights, random tokens, one size of model at a time.

    engine calibrate

executes this plan in several sizes: those that it declares as `MEASURED`.
"""

from __future__ import annotations

import random

from transformers import AutoConfig

from engine import Plan
from stages import DEFAULT_PAGE_TOKENS, find_policy, grpo_step, parse_dtype, parse_group, step_settings

_HEAD_DIM = {64: 16, 256: 32, 576: 64}
# By hidden size; attention kernels care for it. Others get 64.

MEASURED: tuple[dict[str, str], ...] = (
    {"hidden": "64", "prompt_tokens": "1500", "chunk_tokens": "128"},
    {"hidden": "64", "layers": "2", "prompt_tokens": "5000", "chunk_tokens": "1024", "group_size": "2"},
    {"hidden": "256", "prompt_tokens": "4000", "chunk_tokens": "512"},
    {"hidden": "256", "prompt_tokens": "1000", "chunk_tokens": "64", "branches_at_once": "1"},
    {"hidden": "576", "layers": "3", "prompt_tokens": "1500", "chunk_tokens": "512", "vocabulary": "16384"},
    {"hidden": "576", "layers": "3", "prompt_tokens": "600", "chunk_tokens": "64", "vocabulary": "16384"},
    {
        "hidden": "1024", "prompt_tokens": "9", "chunk_tokens": "2", "vocabulary": "8192", "response_tokens": "4",
        "group_size": "2",
    },
)  # fmt: skip
"""Settings with which ``engine calibrate`` measures this plan, as ``--set`` takes them.

They differ in what takes the time: operators in small models, matrix products and the head in large ones, attention
behind long prompts, gradients in short chunks, weights where there are few rows, as in decoding."""


def calibration(
    hidden: int = 64,
    layers: int = 3,
    vocabulary: int = 1024,
    prompt_tokens: int = 1500,
    group_size: int = 4,
    response_tokens: int = 48,
    dtype: str = "float32",
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    seed: int = 0,
) -> Plan:
    """One step of a Llama with ``hidden`` channels, three query heads to a key head where they divide."""
    heads = max(1, hidden // _HEAD_DIM.get(hidden, 64))
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads // 2 or 1,
        head_dim=hidden // heads,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    numbers = random.Random(seed)
    record = {
        "prompt": [numbers.randrange(vocabulary) for _ in range(prompt_tokens)],
        "responses": [[numbers.randrange(vocabulary) for _ in range(response_tokens)] for _ in range(group_size)],
        "rewards": [numbers.random() for _ in range(group_size)],
    }
    settings = step_settings(
        learning_rate=1e-4,
        dtype=parse_dtype(dtype),
        seed=seed,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
    )
    group = parse_group(record, where="calibration", tokenizer=None, vocab_size=vocabulary)
    return grpo_step(name="calibration", policy=find_policy(config), groups=[group], settings=settings)
