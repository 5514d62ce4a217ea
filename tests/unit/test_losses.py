"""Losses against a reference that shares nothing with them: plain loops over responses and tokens, and finite
differences of those loops, in float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import StageFailedError, UsageError
from stages.advantages import GroupAdvantages, group_advantages
from stages.groups import Group, Response
from stages.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LOSSES,
    LossBatch,
    LossConfig,
    LossResult,
    evaluate_loss,
    make_batch,
)

DEFAULT_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "gspo": "seq-mean-token-mean",
    "cispo": "token-mean",
}

Rows = list[list[float]]


@dataclasses.dataclass
class Case:
    """One step: ``groups`` with given advantages, and scores of the trainable tokens as lists a response."""

    groups: list[Group]
    logp: list[list[float]]
    entropy: list[list[float]]

    @property
    def responses(self) -> list[Response]:
        return [response for group in self.groups for response in group.responses]

    def advantages(self) -> list[GroupAdvantages]:
        return [group_advantages(group) for group in self.groups]

    def batch(self, dtype: torch.dtype = torch.float64) -> LossBatch:
        return make_batch(self.groups, self.advantages(), dtype)

    def vectors(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        return flat(self.logp, dtype), flat(self.entropy, dtype)


def flat(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def make_case(
    seed: int, sizes: Sequence[Sequence[int]] = ((3, 0, 2), (4, 1)), old: str = "some", spread: float = 0.6
) -> Case:
    """Responses of the given lengths; the second of a group has an odd mask, the second group's last none at all."""
    draw = random.Random(seed)
    groups, logp, entropy = [], [], []
    for number, lengths in enumerate(sizes):
        responses = []
        for index, length in enumerate(lengths):
            mask = tuple(draw.random() < 0.75 for _ in range(length)) if index else (True,) * length
            if number and index == len(lengths) - 1:
                mask = (False,) * length
            now = [-draw.uniform(0.5, 3.0) for _ in range(length)]
            near = tuple(min(0.0, value + draw.uniform(-spread, spread)) for value in now)
            per_token = tuple(draw.uniform(-2, 2) for _ in range(length))
            has_old = old == "all" or (old == "some" and (index + number) % 2 == 0)
            responses.append(
                Response(
                    token_ids=(5,) * length,
                    mask=mask,
                    advantage=per_token if index % 2 else draw.uniform(-2, 2),
                    old_logprobs=near if has_old else None,
                    ref_logprobs=tuple(value - draw.uniform(-0.4, 0.4) for value in now),
                )
            )
            logp.append([value for value, bit in zip(now, mask, strict=True) if bit])
            entropy.append([draw.uniform(0.1, 3.0) for bit in mask if bit])
        groups.append(Group(prompt_ids=(1, 2), responses=tuple(responses), source=f"line {number + 1}"))
    return Case(groups, logp, entropy)


def kept(values: Sequence[float], response: Response) -> list[float]:
    return [value for value, bit in zip(values, response.mask, strict=True) if bit]


def brute_force(config: LossConfig, case: Case, logp: Rows, entropy: Rows, anchor: Rows) -> float:
    """The table of losses, read aloud. ``anchor`` is logp where it counts as a constant."""
    responses = case.responses
    low = 1 - config.epsilon
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    total_tokens = sum(len(row) for row in logp)
    aggregation = config.aggregation or DEFAULT_AGGREGATION[config.loss]
    longest = config.max_response_tokens or max(len(response.token_ids) for response in responses)
    loss = 0.0
    for g, response in enumerate(responses):
        tokens = len(logp[g])
        advantage = response.advantage
        assert advantage is not None
        advantages = kept(advantage, response) if isinstance(advantage, tuple) else [advantage] * tokens
        olds = anchor[g] if response.old_logprobs is None else kept(response.old_logprobs, response)
        refs = kept(response.ref_logprobs or (), response)
        for t in range(tokens):
            if config.loss == "gspo":
                ratio = math.exp(sum(logp[g][i] - olds[i] for i in range(tokens)) / tokens)
            else:
                ratio = math.exp(logp[g][t] - olds[t])
            if config.loss == "cispo":
                frozen = math.exp(anchor[g][t] - olds[t])
                term = min(max(frozen, low), high) * advantages[t] * logp[g][t]
            else:
                free = ratio if config.delta is None else min(ratio, config.delta)
                term = min(free * advantages[t], min(max(ratio, low), high) * advantages[t])
            gap = logp[g][t] - refs[t]
            kl = {None: 0.0, "k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[config.kl]
            value = -term + config.beta * kl - config.entropy_bonus * entropy[g][t]
            loss += (
                value
                / {
                    "token-mean": total_tokens,
                    "token-sum": 1,
                    "seq-mean-token-sum": len(responses),
                    "seq-mean-token-mean": len(responses) * tokens,
                    "seq-mean-token-sum-norm": len(responses) * longest,
                }[aggregation]
            )
    return loss


def slopes(config: LossConfig, case: Case, step: float = 1e-6) -> torch.Tensor:
    values = []
    for g, row in enumerate(case.logp):
        for t in range(len(row)):
            ends = []
            for sign in (1, -1):
                moved = [list(other) for other in case.logp]
                moved[g][t] += sign * step
                ends.append(brute_force(config, case, moved, case.entropy, case.logp))
            values.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(values, dtype=torch.float64)


def check(config: LossConfig, case: Case) -> None:
    result = evaluate_loss(config, case.batch(), *case.vectors())
    expected = brute_force(config, case, case.logp, case.entropy, case.logp)
    assert result.loss == pytest.approx(expected, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(result.d_logprobs, slopes(config, case), rtol=1e-6, atol=1e-8)
    parts = result.metrics["loss_policy"] + result.metrics["loss_kl"] + result.metrics["loss_entropy"]
    assert parts == pytest.approx(result.loss, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_every_loss_equals_plain_loops_and_its_derivative_their_slope(loss: str, seed: int) -> None:
    check(LossConfig(loss=loss), make_case(seed))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_of_every_loss_equals_plain_loops(loss: str, aggregation: str) -> None:
    check(LossConfig(loss=loss, aggregation=aggregation, epsilon_high=0.28), make_case(7))


@pytest.mark.parametrize("kl", KL_ESTIMATORS)
@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_kl_is_a_term_of_the_loss_aggregated_like_the_rest(loss: str, kl: str) -> None:
    check(LossConfig(loss=loss, kl=kl, beta=0.3), make_case(3))


def test_delta_caps_the_ratio_of_the_unclipped_term_only() -> None:
    case = make_case(5, old="all", spread=2.0)
    config = LossConfig(delta=1.5)
    check(config, case)
    capped = evaluate_loss(config, case.batch(), *case.vectors())
    plain = evaluate_loss(LossConfig(), case.batch(), *case.vectors())
    changed = (capped.d_logprobs != plain.d_logprobs).double().mean()
    assert changed > 0
    assert capped.metrics["clip_fraction_delta"] == pytest.approx(float(changed))


def test_the_norm_of_dr_grpo_is_the_declared_maximum_or_the_longest_response_with_its_masked_tokens() -> None:
    check(LossConfig(loss="dr_grpo", max_response_tokens=64), make_case(2))
    case = make_case(2, sizes=((2, 3), (1, 9)))  # the response of nine tokens is fully masked
    assert case.batch().longest_response_tokens == 9
    check(LossConfig(loss="dr_grpo"), case)


def test_the_entropy_bonus_is_taken_off_and_its_derivative_is_the_weight_of_a_token() -> None:
    case = make_case(4)
    check(LossConfig(loss="dapo", entropy_bonus=0.2), case)
    result = evaluate_loss(LossConfig(loss="dapo", entropy_bonus=0.2), case.batch(), *case.vectors())
    tokens = len(result.d_entropies)
    torch.testing.assert_close(result.d_entropies, torch.full((tokens,), -0.2 / tokens, dtype=torch.float64))


def test_without_an_entropy_bonus_entropies_may_be_absent_and_their_derivative_is_zero() -> None:
    case = make_case(4)
    result = evaluate_loss(LossConfig(), case.batch(), case.vectors()[0])
    assert not result.d_entropies.any()
    assert "entropy" not in result.metrics


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_old_logprobs_every_ratio_is_exactly_one(loss: str, dtype: torch.dtype) -> None:
    case = make_case(6, old="none")
    result = evaluate_loss(LossConfig(loss=loss), case.batch(dtype), *case.vectors(dtype))
    assert result.metrics["ratio_min"] == result.metrics["ratio_max"] == 1.0
    assert result.metrics["kl_old"] == 0.0
    assert "old_logprob_drift_max" not in result.metrics


@given(st.lists(st.floats(min_value=-60, max_value=0), min_size=1, max_size=30), st.sampled_from(sorted(LOSSES)))
@settings(max_examples=50, deadline=None)
def test_old_logprobs_equal_to_the_recomputed_ones_are_as_good_as_absent(logp: list[float], loss: str) -> None:
    def step(old: tuple[float, ...] | None) -> LossResult:
        responses = (Response(token_ids=(5,) * len(logp), mask=(True,) * len(logp), advantage=1.5, old_logprobs=old),)
        batch = make_batch(
            [Group(prompt_ids=(1,), responses=responses, source="line 1")],
            [GroupAdvantages(values=(1.5,))],
            torch.float32,
        )
        return evaluate_loss(LossConfig(loss=loss), batch, torch.tensor(logp, dtype=torch.float32))

    given_, absent = step(tuple(logp)), step(None)
    assert given_.loss == absent.loss
    assert torch.equal(given_.d_logprobs, absent.d_logprobs)
    assert given_.metrics["old_logprob_drift_max"] == 0.0


def test_old_logprobs_off_by_rounding_are_used_as_given_and_the_drift_is_reported() -> None:
    mask = (True, True, False)
    response = Response(token_ids=(5, 6, 7), mask=mask, advantage=1.0, old_logprobs=(-1.0, -2.001, -9.0))
    batch = make_batch(
        [Group(prompt_ids=(1,), responses=(response,), source="line 1")],
        [GroupAdvantages(values=(1.0,))],
        torch.float64,
    )
    result = evaluate_loss(LossConfig(), batch, torch.tensor([-1.0, -2.0], dtype=torch.float64))
    assert result.metrics["ratio_max"] == pytest.approx(math.exp(0.001), rel=1e-12)
    assert result.metrics["old_logprob_drift_max"] == pytest.approx(0.001)
    assert result.metrics["old_logprob_drift_mean"] == pytest.approx(0.0005)


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from(sorted(LOSSES)), st.randoms())
@settings(max_examples=40, deadline=None)
def test_permuting_responses_permutes_derivatives(seed: int, loss: str, draw: random.Random) -> None:
    case = make_case(seed, sizes=((3, 0, 2, 4), (1, 2)))
    config = LossConfig(loss=loss, kl="k3", beta=0.1)
    order = list(range(len(case.responses)))
    draw.shuffle(order)
    shuffled = Case(
        [Group(prompt_ids=(1,), responses=tuple(case.responses[i] for i in order), source="shuffled")],
        [case.logp[i] for i in order],
        [case.entropy[i] for i in order],
    )
    before = evaluate_loss(config, case.batch(), *case.vectors())
    after = evaluate_loss(config, shuffled.batch(), *shuffled.vectors())
    rows = torch.split(before.d_logprobs, [len(row) for row in case.logp])
    expected = torch.cat([rows[i] for i in order])
    assert after.loss == pytest.approx(before.loss, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(after.d_logprobs, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_normalisation_does_not_depend_on_how_responses_are_grouped(loss: str) -> None:
    case = make_case(8)
    alone = [
        Group(prompt_ids=(9,), responses=(response,), source=f"line {number}")
        for number, response in enumerate(case.responses)
    ]
    regrouped = Case(alone, case.logp, case.entropy)
    one = evaluate_loss(LossConfig(loss=loss), case.batch(), *case.vectors())
    other = evaluate_loss(LossConfig(loss=loss), regrouped.batch(), *regrouped.vectors())
    assert one.loss == other.loss
    assert torch.equal(one.d_logprobs, other.d_logprobs)


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_advantages_give_a_derivative_of_exactly_zero(loss: str) -> None:
    group = Group(
        prompt_ids=(1,),
        responses=tuple(
            Response(token_ids=(5, 6), mask=(True, True), reward=0.1, old_logprobs=(-1.0, -3.0)) for _ in range(3)
        ),
        source="line 1",
    )
    config = LossConfig(loss=loss)
    batch = make_batch([group], [group_advantages(group, scale=config.scale_advantages)], torch.float32)
    result = evaluate_loss(config, batch, torch.full((6,), -2.0))
    assert result.loss == 0
    assert not result.d_logprobs.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_an_empty_and_a_fully_masked_response_add_no_token_and_no_nan_but_count_in_the_step(loss: str) -> None:
    case = make_case(1, sizes=((2, 0), (3, 4)))
    result = evaluate_loss(LossConfig(loss=loss), case.batch(), *case.vectors())
    assert result.metrics["responses"] == 4
    assert result.metrics["tokens"] == 5
    assert torch.isfinite(result.d_logprobs).all()
    check(LossConfig(loss=loss), case)


def test_a_step_without_a_trainable_token_is_refused() -> None:
    group = Group(prompt_ids=(1,), responses=(Response(token_ids=(5,), mask=(False,), advantage=1.0),), source="line 1")
    with pytest.raises(UsageError, match="none of the step's 1 responses has a trainable token"):
        make_batch([group], [GroupAdvantages(values=(1.0,))], torch.float32)


def test_the_batch_holds_trainable_tokens_in_canonical_order() -> None:
    case = make_case(9, sizes=((2, 0), (3, 4)))
    batch = case.batch()
    assert batch.response_index.tolist() == [0, 0, 2, 2, 2]
    assert batch.has_old.tolist() == [True, True, False, False, False]
    assert batch.old_logprobs is not None
    assert batch.old_logprobs[2:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_it_computes_in_the_dtype_of_the_logprobs_but_at_least_in_float32(
    dtype: torch.dtype, computed: torch.dtype
) -> None:
    case = make_case(3)
    result = evaluate_loss(LossConfig(), case.batch(), *case.vectors(dtype))
    assert result.d_logprobs.dtype == result.d_entropies.dtype == computed


@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_inputs_give_the_same_bits_with_and_without_grad_mode(loss: str) -> None:
    case = make_case(11, sizes=((300, 200), (500, 40)))
    config = LossConfig(loss=loss, kl="k3", beta=0.1, entropy_bonus=0.01)
    first = evaluate_loss(config, case.batch(torch.float32), *case.vectors(torch.float32))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again = evaluate_loss(config, case.batch(torch.float32), *case.vectors(torch.float32))
        assert again.loss == first.loss
        assert torch.equal(again.d_logprobs, first.d_logprobs)
        assert again.metrics == first.metrics


def test_metrics_count_tokens_whose_derivative_clipping_changes() -> None:
    old = (math.log(0.5), math.log(0.5), math.log(0.5), math.log(0.5))
    response = Response(token_ids=(1, 2, 3, 4), mask=(True,) * 4, advantage=(1.0, -1.0, 1.0, -1.0), old_logprobs=old)
    group = Group(prompt_ids=(1,), responses=(response,), source="line 1")
    batch = make_batch([group], [group_advantages(group)], torch.float64)
    logp = torch.log(torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64))
    result = evaluate_loss(LossConfig(), batch, logp)
    assert result.metrics["clip_fraction_high"] == result.metrics["clip_fraction_low"] == 0.25
    assert (result.d_logprobs == 0).tolist() == [True, False, False, True]
    weighted = evaluate_loss(LossConfig(loss="cispo"), batch, logp)
    assert weighted.metrics["clip_fraction_high"] == weighted.metrics["clip_fraction_low"] == 0.5
    assert weighted.d_logprobs.all()


def test_reference_logprobs_for_some_responses_only_are_refused_with_the_place() -> None:
    full = Response(token_ids=(5,), mask=(True,), advantage=1.0, ref_logprobs=(-1.0,))
    bare = Response(token_ids=(5,), mask=(True,), advantage=1.0)
    group = Group(prompt_ids=(1,), responses=(full, bare), source="line 1")
    with pytest.raises(UsageError, match="line 1, response 1: no ref_logprobs"):
        make_batch([group], [group_advantages(group)], torch.float32)


def test_advantages_that_do_not_match_responses_are_refused() -> None:
    case = make_case(1)
    with pytest.raises(UsageError, match="advantages of 1 groups are given for 2 groups"):
        make_batch(case.groups, case.advantages()[:1], torch.float32)
    wrong = [GroupAdvantages(values=(1.0,)), case.advantages()[1]]
    with pytest.raises(UsageError, match="line 1: 1 advantages for 3 responses"):
        make_batch(case.groups, wrong, torch.float32)
    short = [GroupAdvantages(values=(1.0, (), (1.0,))), case.advantages()[1]]
    with pytest.raises(UsageError, match="line 1, response 2: 1 advantages for 2 tokens"):
        make_batch(case.groups, short, torch.float32)


def test_a_kl_term_without_reference_and_a_bonus_without_entropies_are_refused() -> None:
    case = make_case(1)
    bare = dataclasses.replace(case.batch(), ref_logprobs=None)
    with pytest.raises(UsageError, match="kl='k3' needs ref_logprobs"):
        evaluate_loss(LossConfig(kl="k3", beta=0.1), bare, *case.vectors())
    with pytest.raises(UsageError, match=r"entropy_bonus=0\.1 needs entropies"):
        evaluate_loss(LossConfig(entropy_bonus=0.1), bare, case.vectors()[0])


def test_scores_of_another_length_are_refused() -> None:
    case = make_case(1)
    with pytest.raises(UsageError, match=r"logprobs has shape \(1,\)"):
        evaluate_loss(LossConfig(), case.batch(), torch.zeros(1))


def test_scores_that_are_not_finite_fail_the_stage_with_the_token() -> None:
    case = make_case(1)
    logp, entropy = case.vectors()
    logp[1] = math.nan
    with pytest.raises(StageFailedError, match="logprobs of the policy are not finite: nan at trainable token 1"):
        evaluate_loss(LossConfig(), case.batch(), logp, entropy)


def test_old_logprobs_far_from_the_policy_are_refused_instead_of_becoming_nan() -> None:
    response = Response(token_ids=(5,), mask=(True,), advantage=-1.0, old_logprobs=(-200.0,))
    group = Group(prompt_ids=(1,), responses=(response,), source="line 1")
    batch = make_batch([group], [group_advantages(group)], torch.float32)
    with pytest.raises(UsageError, match=r"199\.0 nats, at response 0"):
        evaluate_loss(LossConfig(), batch, torch.tensor([-1.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppo"}, "loss='ppo' is not known; choose one of grpo, dapo, bnpo, dr_grpo, gspo, cispo"),
        ({"aggregation": "mean"}, "aggregation='mean' is not known; choose one of token-mean, token-sum"),
        ({"kl": "k4", "beta": 1.0}, "kl='k4' is not known; choose one of k1, k2, k3"),
        ({"epsilon": -0.1}, "epsilon=-0.1 is not a finite number of at least 0"),
        ({"epsilon_high": math.nan}, "epsilon_high=nan is not a finite number"),
        ({"delta": 1.0}, "delta=1.0 would cap the ratio where it starts"),
        ({"delta": 2.0, "loss": "cispo"}, "delta=2.0 has no effect on cispo"),
        ({"beta": 0.1}, "beta=0.1 has no effect without a KL estimator; set kl to one of k1, k2, k3"),
        ({"beta": -1.0, "kl": "k1"}, "beta=-1.0 is not a finite number"),
        ({"entropy_bonus": math.inf}, "entropy_bonus=inf is not a finite number"),
        ({"max_response_tokens": 0}, "max_response_tokens=0 is not a whole number"),
        ({"max_response_tokens": True}, "max_response_tokens=True is not a whole number"),
        ({"epsilon": "0.2"}, "epsilon='0.2' is not a finite number"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value_and_what_is_known(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        LossConfig(**options)
    assert message in str(caught.value)


def test_only_dr_grpo_leaves_advantages_unscaled() -> None:
    assert [name for name in LOSSES if not LossConfig(loss=name).scale_advantages] == ["dr_grpo"]
