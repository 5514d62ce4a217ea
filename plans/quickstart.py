"""One exact GRPO step on a real model and real text, on one CPU, under a budget that dense autograd would break.

    engine execute quickstart

The model is SmolLM2-135M-Instruct in float32, the prompt 2,048 tokens of Python's own documentation with a question on
it. The step samples its own answers from the prompt's state, `graded` rewards them, and the weights are updated. After
that, dense autograd of the same work is measured by the same tracker; it gets no optimizer and one sequence at a time
with every layer checkpointed.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

from engine import Plan
from engine.budget import Budget
from engine.errors import UsageError
from engine.units import MIB, format_bytes
from models.policy import PolicySource
from plans.quickstart_data import ANSWERS, documentation_prompt
from plans.smollm2 import checkpoint_directory
from stages import (
    DEFAULT_PAGE_TOKENS,
    GrpoSettings,
    Prompt,
    RolloutSettings,
    Sample,
    find_policy,
    grpo_step,
    parse_dtype,
    step_settings,
)
from stages.dense import dense_peak_bytes, largest_group

DEVICE_BUDGET_BYTES = 1152 * MIB
# Weights and gradients take 1,026 MiB, the head's share of the tied embedding's gradient 108 MiB; what is left is for
# state, workspace and buffers.

RIGHT_ANSWER = ANSWERS[0][0]


def graded(sample: Sample) -> float:
    """Return how well a response agrees with the right answer: F1 over words, from 0 to 1 (as SQuAD scores answers)."""
    given, right = (Counter(re.findall(r"\w+", text.lower())) for text in (sample.text, RIGHT_ANSWER))
    common = (given & right).total()
    return round(2 * common / (given.total() + right.total()), 3)


def quickstart(
    policy: str | None = None,
    prompt_tokens: int = 2048,
    group_size: int = 4,
    max_response_tokens: int = 64,
    gradient: str = "exact",
    loss: str = "grpo",
    dtype: str = "float32",
    learning_rate: float = 1e-6,
    temperature: float = 1.0,
    seed: int = 0,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    stored_inputs: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    state_tier: str = "auto",
    compare_dense: bool = True,
) -> Plan:
    """One step; ``policy`` replaces the model by another checkpoint directory or hub name."""
    source = find_policy(policy or str(checkpoint_directory()))
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise UsageError(
            f"policy {policy!r} has no tokenizer, and the quickstart's prompt is text; name another policy"
        )
    prompt = Prompt(token_ids=tuple(documentation_prompt(tokenizer, prompt_tokens)), source="quickstart")
    rollout = RolloutSettings(reward=graded, group_size=group_size, max_response_tokens=max_response_tokens)
    settings = step_settings(
        gradient=gradient,
        loss=loss,
        learning_rate=learning_rate,
        dtype=parse_dtype(dtype, source.default_dtype()),
        temperature=temperature,
        seed=seed,
        page_tokens=page_tokens,
        state_tier=state_tier,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
        stored_inputs=stored_inputs,
    )
    plan = grpo_step(
        name="quickstart", policy=source, groups=[prompt], settings=settings, rollout=rollout, tokenizer=tokenizer
    )
    if policy is None:
        plan.budget = {"device": DEVICE_BUDGET_BYTES}
    if compare_dense:
        plan.hooks["compare"] = partial(_compare, source, prompt, rollout, settings)
    return plan


def _compare(
    policy: PolicySource, prompt: Prompt, rollout: RolloutSettings, settings: GrpoSettings, budget: Budget
) -> dict[str, object]:
    group = largest_group(prompt, group_size=1, max_response_tokens=rollout.max_response_tokens)
    nbytes = dense_peak_bytes(policy, [group], settings)
    verdict = "would break" if nbytes > budget.device_bytes else "would fit"
    return {
        "dense_peak_bytes": nbytes,
        "lines": [
            f"dense autograd of the same work (layers checkpointed, one sequence at a time, no optimizer): measured "
            f"{format_bytes(nbytes)} of device, {verdict} a budget of {format_bytes(budget.device_bytes)}"
        ],
    }
