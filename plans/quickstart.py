"""One exact GRPO step on a real model and real text, on one CPU, under a budget that dense autograd would break.

    engine execute quickstart

The model is SmolLM2-135M-Instruct in float32, the prompt 2,048 tokens of Python's own documentation with a question on
it, the group four given answers with graded rewards. After the step, dense autograd of the same work is measured by
the same tracker; it gets no optimizer and one sequence at a time with every layer checkpointed.
"""

from __future__ import annotations

from functools import partial

from engine import Plan
from engine.budget import Budget
from engine.errors import UsageError
from engine.units import MIB, format_bytes
from models.policy import PolicySource
from plans.quickstart_data import quickstart_group
from plans.smollm2 import checkpoint_directory
from stages import (
    DEFAULT_PAGE_TOKENS,
    Group,
    GrpoSettings,
    find_policy,
    grpo_step,
    parse_dtype,
    parse_group,
    step_settings,
)
from stages.dense import dense_peak_bytes

DEVICE_BUDGET_BYTES = 1280 * MIB
# Weights and gradients take 1,026 MiB, the head's share of the tied embedding's gradient 108 MiB; what is left is for
# state, workspace and buffers.


def quickstart(
    policy: str | None = None,
    prompt_tokens: int = 2048,
    gradient: str = "exact",
    loss: str = "grpo",
    dtype: str = "float32",
    learning_rate: float = 1e-6,
    temperature: float = 1.0,
    seed: int = 0,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    compare_dense: bool = True,
) -> Plan:
    """One step; ``policy`` replaces the model by another checkpoint directory or hub name."""
    source = find_policy(policy or str(checkpoint_directory()))
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise UsageError(
            f"policy {policy!r} has no tokenizer, and the quickstart's prompt is text; name another policy"
        )
    group = parse_group(
        quickstart_group(tokenizer, prompt_tokens),
        where="quickstart",
        tokenizer=tokenizer,
        vocab_size=source.config.vocab_size,
    )
    settings = step_settings(
        gradient=gradient,
        loss=loss,
        learning_rate=learning_rate,
        dtype=parse_dtype(dtype, source.default_dtype()),
        temperature=temperature,
        seed=seed,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
    )
    plan = grpo_step(name="quickstart", policy=source, groups=[group], settings=settings, tokenizer=tokenizer)
    if policy is None:
        plan.budget = {"device": DEVICE_BUDGET_BYTES}
    if compare_dense:
        plan.hooks["compare"] = partial(_compare, source, (group,), settings)
    return plan


def _compare(
    policy: PolicySource, groups: tuple[Group, ...], settings: GrpoSettings, budget: Budget
) -> dict[str, object]:
    nbytes = dense_peak_bytes(policy, groups, settings)
    verdict = "would break" if nbytes > budget.device_bytes else "would fit"
    return {
        "dense_peak_bytes": nbytes,
        "lines": [
            f"dense autograd of the same work (layers checkpointed, one sequence at a time, no optimizer): measured "
            f"{format_bytes(nbytes)} of device, {verdict} a budget of {format_bytes(budget.device_bytes)}"
        ],
    }
