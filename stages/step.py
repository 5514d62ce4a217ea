"""A whole GRPO run in one call: one step from given groups, or many steps that sample their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.errors import UsageError
from engine.plan import Plan
from models.policy import PolicySource, find_policy
from stages.audit import audit
from stages.checks import check_count
from stages.groups import Group, Prompt, StepGroup, require_trainable
from stages.settings import GrpoSettings, RolloutSettings
from stages.space import GrpoSpace


def grpo_step(
    *,
    name: str,
    policy: PolicySource | str,
    groups: Sequence[StepGroup],
    settings: GrpoSettings,
    rollout: RolloutSettings | None = None,
    tokenizer: Any = None,
) -> Plan:
    """Return the plan of one exact GRPO step over all ``groups``; see `grpo_run`."""
    return grpo_run(name=name, policy=policy, steps=[groups], settings=settings, rollout=rollout, tokenizer=tokenizer)


def grpo_run(
    *,
    name: str,
    policy: PolicySource | str,
    steps: Sequence[Sequence[StepGroup]],
    settings: GrpoSettings,
    rollout: RolloutSettings | None = None,
    tokenizer: Any = None,
) -> Plan:
    """Return the plan of a run of exact GRPO steps.

    Args:
        name: the plan's name.
        policy: what is trained; a checkpoint directory, a configuration or a hub name, or what `find_policy` returns.
        steps: the groups of every step (see `deal`): given ones, or `Prompt`\\ s whose responses are sampled.
        settings: all that decides the result besides.
        rollout: how responses are sampled and rewarded; needed where a group is a `Prompt`.
        tokenizer: saved with checkpoints; turns sampled ids into the text that the reward function sees. None means the
            policy's own, if it has one.

    The plan comes lowered at its fastest choices; its ``space`` holds the others. No weights are loaded.

    Raises:
        UsageError: nothing to train on, or settings that contradict each other.
        UnsupportedModelError: the policy's architecture is refused.
    """
    if not steps:
        raise UsageError("a run has at least one step; give the groups of every step")
    source = find_policy(policy) if isinstance(policy, str) else policy
    for number, groups in enumerate(steps):
        _check_step(number, groups, source, rollout)
    if rollout is not None and not any(isinstance(group, Prompt) for groups in steps for group in groups):
        raise UsageError("rollout says how responses are sampled, but all groups have theirs; leave it out")
    space = GrpoSpace(
        name=name,
        policy=source,
        steps=tuple(tuple(groups) for groups in steps),
        settings=settings,
        rollout=rollout,
        tokenizer=source.tokenizer() if tokenizer is None else tokenizer,
    )
    plan = space.lower(space.first())
    plan.hooks["audit"] = partial(audit, space)
    return plan.hand_over()


def _check_step(
    number: int, groups: Sequence[StepGroup], policy: PolicySource, rollout: RolloutSettings | None
) -> None:
    prompts = [group for group in groups if isinstance(group, Prompt)]
    if not prompts:
        require_trainable([group for group in groups if isinstance(group, Group)])
    if prompts and rollout is None:
        raise UsageError(
            f"step {number}: {prompts[0].source} has no responses; give rollout=RolloutSettings(reward=...) to sample "
            "them, or groups with responses"
        )
    vocab = int(policy.config.vocab_size)
    if rollout is not None and any(not 0 <= token < vocab for token in rollout.stop_token_ids or ()):
        raise UsageError(
            f"stop_token_ids={rollout.stop_token_ids!r} are not all in the vocabulary of {vocab}, so some could never "
            "end a response"
        )
    for prompt in prompts:
        wrong = [token for token in prompt.token_ids if not 0 <= token < vocab]
        if wrong or not prompt.token_ids:
            raise UsageError(
                f"step {number}: {prompt.source} has "
                + (f"the token id {wrong[0]}, outside the vocabulary of {vocab}" if wrong else "no tokens")
            )


def deal(
    groups: Sequence[StepGroup], *, steps: int, groups_per_step: int | None = None, first_step: int = 0
) -> list[list[StepGroup]]:
    """Deal groups to steps in their order: ``groups_per_step`` to each, or an even share of them where that is None.

    Prompts come round again when all have had their turn; given groups are used once. What is left over is not used.
    A run that goes on from another one gives its ``first_step``, and the steps before it have had their prompts.

    Raises:
        UsageError: a number below 1, or fewer given groups than the steps need.
    """
    check_count("steps", steps)
    check_count("first_step", first_step, least=0)
    if groups_per_step is not None:
        check_count("groups_per_step", groups_per_step)
    each = groups_per_step if groups_per_step is not None else max(1, len(groups) // (first_step + steps))
    need = each * (first_step + steps)
    if need > len(groups) and not (groups and all(isinstance(group, Prompt) for group in groups)):
        raise UsageError(
            f"{steps} steps of {each} groups need {need} groups with responses, but there are {len(groups)}; "
            "give more, or fewer steps or groups_per_step"
        )
    numbers = range(first_step, first_step + steps)
    return [[groups[(step * each + index) % len(groups)] for index in range(each)] for step in numbers]
