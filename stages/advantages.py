"""Advantages of one group: how much better each response was than the group's baseline.

``(reward - mean) / (std + 1e-4)`` with the unbiased standard deviation (GRPO, arXiv 2402.03300), or without the
division (Dr.GRPO, arXiv 2503.20783). Every response of the group counts in the baseline, empty and fully masked ones
too. Given advantages are used as they are and win over rewards.

A group that can't teach anything gets advantages of exactly 0, decided by comparing rewards, never by a deviation
that rounding keeps above zero: all rewards equal, or a single response (whose baseline is its own reward). Each such
group is named in a note, which the run reports. Plain Python: a group has a handful of responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import UsageError
from stages.groups import Group, Response

Baseline = Literal["mean", "leave-one-out"]
Advantage = float | tuple[float, ...]

STD_FLOOR = 1e-4
# Added to the standard deviation, so that nearly equal rewards are not blown up; the value GRPO trainers share.


@dataclass(frozen=True, kw_only=True)
class GroupAdvantages:
    """``values`` holds one number a response, or [tokens] numbers where given so; ``notes`` is what a run reports."""

    values: tuple[Advantage, ...]
    notes: tuple[str, ...] = ()


def group_advantages(group: Group, *, scale: bool = True, baseline: Baseline = "mean") -> GroupAdvantages:
    """Return the advantages of the group's responses, in their order.

    Args:
        group: responses with rewards, or all of them with advantages.
        scale: divide by the group's unbiased standard deviation + 1e-4 (``LossConfig.scale_advantages``).
        baseline: what is taken off a reward: the group's ``mean``, or the mean of the other responses
            (``leave-one-out``, RLOO, arXiv 2402.14740). A group of one response has advantage 0 with both.

    Raises:
        UsageError: an unknown baseline, responses of which some only have an advantage, no reward at all, or
            rewards too large for their deviation to be a number.
    """
    if baseline not in get_args(Baseline):
        raise UsageError(f"baseline={baseline!r} is not known; choose one of {', '.join(get_args(Baseline))}")
    given = [response.advantage for response in group.responses if response.advantage is not None]
    if len(given) == len(group.responses):
        return GroupAdvantages(values=tuple(given), notes=_notes_on_given(group, given))
    if given:
        raise UsageError(
            f"{group.source}: {len(given)} of {len(group.responses)} responses have an advantage; give all or none"
        )
    rewards = [_reward(group, index, response) for index, response in enumerate(group.responses)]
    if all(reward == rewards[0] for reward in rewards):
        return GroupAdvantages(values=(0.0,) * len(rewards), notes=(_no_signal(group, rewards),))
    return GroupAdvantages(values=_from_rewards(group, rewards, scale=scale, baseline=baseline))


def _from_rewards(group: Group, rewards: Sequence[float], *, scale: bool, baseline: Baseline) -> tuple[float, ...]:
    try:
        mean = math.fsum(rewards) / len(rewards)
        centred = [reward - mean for reward in rewards]
        std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    except OverflowError:
        std = math.inf
    if not math.isfinite(std):
        raise UsageError(f"{group.source}: rewards from {min(rewards)!r} to {max(rewards)!r} are too large; scale them")
    # reward - mean of the others = (reward - mean of all) * G / (G - 1)
    factor = len(rewards) / (len(rewards) - 1) if baseline == "leave-one-out" else 1.0
    divisor = std + STD_FLOOR if scale else 1.0
    return tuple(value * factor / divisor for value in centred)


def _reward(group: Group, index: int, response: Response) -> float:
    if response.reward is None:
        raise UsageError(f"{group.source}, response {index}: no reward and no advantage; give one of them")
    return response.reward


def _no_signal(group: Group, rewards: Sequence[float]) -> str:
    if len(rewards) == 1:
        return (
            f"{group.source}: one response, whose baseline is its own reward, so its advantage is 0: this group "
            "carries no signal (give its advantage to train on it)"
        )
    return f"{group.source}: all {len(rewards)} rewards are equal: this group carries no signal"


def _notes_on_given(group: Group, given: Sequence[Advantage]) -> tuple[str, ...]:
    notes = []
    if any(response.reward is not None for response in group.responses):
        notes.append(f"{group.source}: advantages and rewards are given: the advantages are used, the rewards are not")
    if all(value == 0 for item in given for value in (item if isinstance(item, tuple) else (item,))):
        notes.append(f"{group.source}: all given advantages are 0: this group carries no signal")
    return tuple(notes)
