"""Advantages: the documented rule, exact zeros where a group teaches nothing, and given numbers that win."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from stages.advantages import STD_FLOOR, Advantage, Baseline, group_advantages
from stages.groups import Group, Response

REWARDS = st.floats(min_value=-1e6, max_value=1e6, allow_subnormal=False)


def group_of(
    rewards: Sequence[float | None],
    advantages: Sequence[Advantage | None] | None = None,
    lengths: Sequence[int] | None = None,
) -> Group:
    advantages = advantages or [None] * len(rewards)
    lengths = lengths or [2] * len(rewards)
    return Group(
        prompt_ids=(1,),
        responses=tuple(
            Response(token_ids=(3,) * length, mask=(True,) * length, reward=reward, advantage=advantage)
            for reward, advantage, length in zip(rewards, advantages, lengths, strict=True)
        ),
        source="rollouts.jsonl line 3",
    )


@given(st.lists(REWARDS, min_size=2, max_size=9).filter(lambda rewards: len(set(rewards)) > 1))
def test_advantages_are_rewards_less_their_mean_over_their_unbiased_deviation(rewards: list[float]) -> None:
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    result = group_advantages(group_of(rewards), scale=True)
    assert result.values == pytest.approx([(r - mean) / (std + STD_FLOOR) for r in rewards], rel=1e-9, abs=1e-7)
    assert result.notes == ()


def test_without_scaling_advantages_are_differences_from_the_mean() -> None:
    assert group_advantages(group_of([1.0, 0.0, 2.0]), scale=False).values == (0.0, -1.0, 1.0)


def test_leave_one_out_takes_off_the_mean_of_the_other_responses() -> None:
    values = group_advantages(group_of([1.0, 0.0, 5.0]), scale=False, baseline="leave-one-out").values
    assert values == pytest.approx((1.0 - 2.5, 0.0 - 3.0, 5.0 - 0.5))


@given(REWARDS, st.integers(min_value=2, max_value=20), st.booleans())
def test_equal_rewards_give_exactly_zero_and_a_note(reward: float, size: int, scale: bool) -> None:
    result = group_advantages(group_of([reward] * size), scale=scale)
    assert result.values == (0.0,) * size
    assert result.notes == (f"rollouts.jsonl line 3: all {size} rewards are equal: this group carries no signal",)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_a_group_of_one_response_has_advantage_zero_and_never_its_raw_reward(scale: bool, baseline: Baseline) -> None:
    result = group_advantages(group_of([7.5]), scale=scale, baseline=baseline)
    assert result.values == (0.0,)
    assert "one response" in result.notes[0]
    assert "no signal" in result.notes[0]


def test_an_empty_response_counts_in_the_baseline() -> None:
    values = group_advantages(group_of([1.0, 0.0, 2.0], lengths=[2, 0, 2]), scale=False).values
    assert values == (0.0, -1.0, 1.0)


def test_given_advantages_win_over_rewards_and_a_note_says_so() -> None:
    result = group_advantages(group_of([1.0, 0.0], advantages=[0.25, (0.5, -1.0)]), scale=True)
    assert result.values == (0.25, (0.5, -1.0))
    assert "the advantages are used, the rewards are not" in result.notes[0]


def test_given_advantages_alone_need_no_note_unless_all_are_zero() -> None:
    assert group_advantages(group_of([None], advantages=[3.0])).notes == ()
    assert "no signal" in group_advantages(group_of([None], advantages=[(0.0, 0.0)])).notes[0]


def test_some_responses_with_and_some_without_an_advantage_are_refused() -> None:
    with pytest.raises(UsageError, match="line 3: 1 of 2 responses have an advantage; give all or none"):
        group_advantages(group_of([1.0, 0.0], advantages=[0.25, None]))


def test_a_response_without_reward_and_advantage_is_refused_with_its_place() -> None:
    with pytest.raises(UsageError, match="line 3, response 1: no reward and no advantage"):
        group_advantages(group_of([1.0, None]))


def test_rewards_whose_deviation_overflows_are_refused_instead_of_becoming_nan() -> None:
    with pytest.raises(UsageError, match="too large"):
        group_advantages(group_of([1e308, -1e308]))
    large = group_advantages(group_of([1e100, -1e100])).values
    assert large == pytest.approx((math.sqrt(0.5), -math.sqrt(0.5)))


def test_an_unknown_baseline_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="baseline='median' is not known; choose one of mean, leave-one-out"):
        group_advantages(group_of([1.0]), baseline="median")  # type: ignore[arg-type]
