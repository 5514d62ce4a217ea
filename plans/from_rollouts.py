"""The everyday plan: one exact GRPO step from a rollouts file.

    engine simulate from_rollouts --set policy=DIR_OR_NAME --set rollouts=FILE.jsonl
    engine execute from_rollouts --set policy=DIR_OR_NAME --set rollouts=FILE.jsonl

The file has one group a line: ``prompt``, ``responses``, ``rewards`` or ``advantages``, and optionally
``old_logprobs``, ``ref_logprobs`` and ``response_masks`` (see ``stages/rollouts.py``).
"""

from __future__ import annotations

from typing import Literal

from engine import Plan
from engine.errors import UsageError
from stages import DEFAULT_PAGE_TOKENS, find_policy, grpo_step, parse_dtype, read_rollouts, step_settings


def from_rollouts(
    policy: str,
    rollouts: str,
    gradient: str = "exact",
    loss: str = "grpo",
    aggregation: str | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    kl: str | None = None,
    beta: float = 0.0,
    entropy_bonus: float = 0.0,
    max_response_tokens: int | None = None,
    learning_rate: float = 1e-6,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    dtype: str | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    baseline: Literal["mean", "leave-one-out"] = "mean",
    groups_per_step: int | None = None,
    append_eos: bool = False,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
) -> Plan:
    """One step over all groups of ``rollouts``, or over the first ``groups_per_step`` of them."""
    source = find_policy(policy)
    tokenizer = source.tokenizer()
    groups = read_rollouts(rollouts, tokenizer=tokenizer, vocab_size=source.config.vocab_size, append_eos=append_eos)
    settings = step_settings(
        gradient=gradient,
        loss=loss,
        aggregation=aggregation,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        kl=kl,
        beta=beta,
        entropy_bonus=entropy_bonus,
        max_response_tokens=max_response_tokens,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        dtype=parse_dtype(dtype, source.default_dtype()),
        temperature=temperature,
        seed=seed,
        baseline=baseline,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
    )
    if groups_per_step is not None and not 1 <= groups_per_step <= len(groups):
        raise UsageError(
            f"groups_per_step={groups_per_step}: {rollouts} has {len(groups)} groups; give 1 to {len(groups)}"
        )
    plan = grpo_step(
        name="from_rollouts", policy=source, groups=groups[:groups_per_step], settings=settings, tokenizer=tokenizer
    )
    if groups_per_step is not None and groups_per_step < len(groups):
        plan.notes.append(f"groups {groups_per_step} to {len(groups) - 1} of {rollouts} are left out of this step")
    return plan
