"""The everyday plan: exact GRPO steps from a rollouts file.

    engine simulate from_rollouts --set policy=DIR_OR_NAME --set rollouts=FILE.jsonl
    engine execute from_rollouts --set policy=DIR_OR_NAME --set rollouts=FILE.jsonl

The file has one group a line: ``prompt``, ``responses``, ``rewards`` or ``advantages``, and optionally
``old_logprobs``, ``ref_logprobs`` and ``response_masks`` (see ``stages/rollouts.py``).
"""

from __future__ import annotations

from typing import Literal

from engine import Plan
from stages import DEFAULT_PAGE_TOKENS, deal, find_policy, grpo_run, parse_dtype, read_rollouts, step_settings


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
    steps: int = 1,
    first_step: int = 0,
    groups_per_step: int | None = None,
    epochs_per_step: int = 1,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    warmup_updates: int = 0,
    optimizer_state: str | None = None,
    save_optimizer: bool = False,
    checkpoint_every: int | None = None,
    append_eos: bool = False,
    yarn_factor: float | None = None,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    stored_inputs: int | None = None,
    layer_spans: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    state_tier: str = "auto",
) -> Plan:
    """Steps over the groups of ``rollouts`` in their order, ``groups_per_step`` to each; one step takes all of them."""
    source = find_policy(policy)
    source = source if yarn_factor is None else source.with_yarn(yarn_factor)
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
        first_step=first_step,
        epochs_per_step=epochs_per_step,
        schedule=schedule,
        warmup_updates=warmup_updates,
        optimizer_state=optimizer_state,
        save_optimizer=save_optimizer,
        checkpoint_every=checkpoint_every,
        page_tokens=page_tokens,
        state_tier=state_tier,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
        stored_inputs=stored_inputs,
        layer_spans=layer_spans,
    )
    dealt = deal(groups, steps=steps, groups_per_step=groups_per_step, first_step=first_step)
    plan = grpo_run(name="from_rollouts", policy=source, steps=dealt, settings=settings, tokenizer=tokenizer)
    used = first_step * len(dealt[0]) + sum(map(len, dealt))
    if used < len(groups):
        plan.notes.append(f"groups {used} to {len(groups) - 1} of {rollouts} are left out of this run")
    return plan
