"""The loss stage: from all scored tokens of one step to a scalar and its derivative by each of them.

Everything here is a vector over the T trainable tokens (mask 1) of the whole step, in canonical order: group,
response, position. Autograd runs on those vectors only, never through a model, and leaves one number per token for
each scored quantity. Replays use these numbers as cotangents, so normalisation over tokens, responses or the step
can't depend on chunks, on the order of branches or on workers.

A loss is one function from ``_Terms`` to what each token adds, before the minus sign, in the table ``LOSSES``; an
aggregation is one weight a token in the table ``AGGREGATIONS``:

    loss = sum_t weight_t * (-token_t + beta * kl_t - entropy_bonus * entropy_t)

Sources: GRPO arXiv 2402.03300, DAPO 2503.14476, Dr.GRPO 2503.20783, GSPO 2507.18071, CISPO (MiniMax-M1) 2506.13585,
two-sided clipping (INTELLECT-2) 2505.07291; bnpo is DAPO's token mean under the name TRL gives it. The KL estimators
k1, k2, k3 are J. Schulman's, http://joschu.net/blog/kl-approx.html.

Runs on the CPU, whatever the inputs' device, in their dtype but at least float32: sums are over a few thousand numbers
and keep their order, so the same inputs give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import StageFailedError, UsageError
from stages.advantages import Advantage, GroupAdvantages
from stages.groups import Group, Response


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which loss, and its numbers.

    Attributes:
        loss: a name in ``LOSSES``.
        epsilon: the ratio is clipped from below at 1 - epsilon.
        epsilon_high: and from above at 1 + epsilon_high; None means epsilon.
        delta: cap of the ratio in the unclipped term (two-sided clipping), above 1; None means no cap.
        aggregation: a name in ``AGGREGATIONS``; None means the loss's own.
        kl: KL estimator to ``ref_logprobs``: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logp - ref. With
            beta 0 it is measured only.
        beta: factor of the KL term.
        entropy_bonus: factor of the entropy (nats), which is taken off the loss.
        max_response_tokens: the norm of ``seq-mean-token-sum-norm`` (``dr_grpo``); None means the longest response
            of the step, in tokens, masked ones included.

    Raises:
        UsageError: an unknown name, a number out of range, or one that the chosen loss would ignore.
    """

    loss: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    aggregation: str | None = None
    kl: str | None = None
    beta: float = 0.0
    entropy_bonus: float = 0.0
    max_response_tokens: int | None = None

    def __post_init__(self) -> None:
        _known("loss", self.loss, LOSSES)
        if self.aggregation is not None:
            _known("aggregation", self.aggregation, AGGREGATIONS)
        if self.kl is not None:
            _known("kl", self.kl, KL_ESTIMATORS)
        _number("epsilon", self.epsilon)
        if self.epsilon_high is not None:
            _number("epsilon_high", self.epsilon_high)
        if self.delta is not None and _number("delta", self.delta) <= 1:
            raise UsageError(f"delta={self.delta!r} would cap the ratio where it starts, at 1; give more than 1")
        if self.delta is not None and self.loss == "cispo":
            raise UsageError(f"delta={self.delta!r} has no effect on cispo, which has no unclipped term; leave it out")
        if _number("beta", self.beta) > 0 and self.kl is None:
            names = ", ".join(KL_ESTIMATORS)
            raise UsageError(f"beta={self.beta!r} has no effect without a KL estimator; set kl to one of {names}")
        _number("entropy_bonus", self.entropy_bonus, low=-math.inf)
        _norm(self.max_response_tokens)

    @property
    def ratio_range(self) -> tuple[float, float]:
        """The interval that the ratio is clipped to."""
        return 1.0 - self.epsilon, 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def chosen_aggregation(self) -> str:
        """The aggregation in force: the override, or the loss's own."""
        return self.aggregation or LOSSES[self.loss].aggregation

    @property
    def scale_advantages(self) -> bool:
        """Whether advantages from rewards are divided by the group's deviation (not for dr_grpo)."""
        return LOSSES[self.loss].scale_advantages


@dataclass(frozen=True, kw_only=True, eq=False)
class LossBatch:
    """What is known of one step's T trainable tokens besides their scores, in canonical order.

    Attributes:
        response_index: [T] int64: the number of each token's response within the step, never decreasing.
        num_responses: responses of the step, empty and fully masked ones included.
        longest_response_tokens: tokens of the longest response, masked ones included.
        advantages: [T].
        has_old: [T] bool: the token's response came with log-probs of the policy that sampled it.
        old_logprobs: [T] nats, 0 where ``has_old`` is False; None where no response came with them.
        ref_logprobs: [T] nats, or None.
        first_logprobs: [T] nats: what the step's first update scored; stands for old log-probs where none were given,
            so that later updates from the same rollouts have a ratio. None in the first update, where the ratio is 1.
    """

    response_index: Tensor
    num_responses: int
    longest_response_tokens: int
    advantages: Tensor
    has_old: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    first_logprobs: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LossResult:
    """The loss and what replays need: ``d_logprobs`` and ``d_entropies`` are [T], in the dtype it was computed in.

    ``metrics`` is for reports. ``loss_policy + loss_kl + loss_entropy`` is the loss; the other keys are documented at
    :func:`evaluate_loss`.
    """

    loss: float
    d_logprobs: Tensor
    d_entropies: Tensor
    metrics: dict[str, float]


def make_batch(groups: Sequence[Group], advantages: Sequence[GroupAdvantages], dtype: torch.dtype) -> LossBatch:
    """Return the step's trainable tokens as vectors of ``dtype``, on the CPU.

    Raises:
        UsageError: there is no trainable token, advantages don't match responses, or only some of the responses
            with trainable tokens have ``ref_logprobs``.
    """
    index: list[int] = []
    values: list[float] = []
    old: list[float] = []
    has_old: list[bool] = []
    ref: list[float] = []
    rows = _rows(groups, advantages)
    for number, (_, response, advantage) in enumerate(rows):
        kept = [position for position, bit in enumerate(response.mask) if bit]
        index += [number] * len(kept)
        values += [advantage[position] if isinstance(advantage, tuple) else advantage for position in kept]
        has_old += [response.old_logprobs is not None] * len(kept)
        old += [0.0 if response.old_logprobs is None else response.old_logprobs[position] for position in kept]
        if response.ref_logprobs is not None:
            ref += [response.ref_logprobs[position] for position in kept]
    if not index:
        raise UsageError(f"none of the step's {len(rows)} responses has a trainable token; the loss is not defined")
    _all_or_none_ref(rows, len(ref), len(index))
    return LossBatch(
        response_index=torch.tensor(index, dtype=torch.int64),
        num_responses=len(rows),
        longest_response_tokens=max(len(response.token_ids) for _, response, _ in rows),
        advantages=torch.tensor(values, dtype=dtype),
        has_old=torch.tensor(has_old, dtype=torch.bool),
        old_logprobs=torch.tensor(old, dtype=dtype) if any(has_old) else None,
        ref_logprobs=torch.tensor(ref, dtype=dtype) if ref else None,
    )


def evaluate_loss(
    config: LossConfig, batch: LossBatch, logprobs: Tensor, entropies: Tensor | None = None
) -> LossResult:
    """Return the step's loss and its derivative by every trainable token's log-prob and entropy.

    Args:
        config: the loss.
        batch: the step's tokens (:func:`make_batch`). A reference policy's own scores go in with
            ``dataclasses.replace(batch, ref_logprobs=...)``.
        logprobs: [T] log-probs (nats) of the current policy; any float dtype and device, no graph needed.
        entropies: [T] entropies (nats); may be None where ``entropy_bonus`` is 0.

    Returns:
        Derivatives are on the device of ``logprobs`` and at least float32. Metrics: ``loss_policy``, ``loss_kl``,
        ``loss_entropy``; ``ratio_mean``, ``ratio_min``, ``ratio_max`` (the ratio the loss uses: one a response for
        gspo); ``clip_fraction_low``, ``clip_fraction_high`` and, with delta, ``clip_fraction_delta``, fractions of
        tokens whose derivative clipping changes; ``kl_old`` (k3 from the sampling policy); ``advantage_mean``;
        ``tokens``; ``responses``; where known ``kl_ref`` (the chosen estimator, or k3), ``entropy``, and, of tokens
        with given old log-probs, ``old_logprob_drift_max`` and ``old_logprob_drift_mean`` of |logp - old|. All means
        are over tokens.

    Raises:
        UsageError: shapes that don't match, a KL term without reference log-probs, an entropy bonus without
            entropies, or given log-probs so far off that the loss is not finite.
        StageFailedError: a score is not finite.
    """
    _check_inputs(config, batch, logprobs, entropies)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    with torch.inference_mode(False), torch.enable_grad():
        scores = _leaf(logprobs, dtype)
        entropy = torch.zeros_like(scores) if entropies is None else _cpu(entropies, dtype)
        terms = _Terms.of(config, batch, scores)
        weights = AGGREGATIONS[config.chosen_aggregation](config, batch).to(dtype)
        policy = -(weights * LOSSES[config.loss].token_terms(config, terms)).sum()
        kl = config.beta * (weights * _kl(config, terms)).sum() if config.beta else torch.zeros_like(policy)
        loss = policy + kl
        (d_logprobs,) = torch.autograd.grad(loss, scores)
    d_entropies = weights * (0.0 - config.entropy_bonus)
    bonus = (d_entropies * entropy).sum()
    total = float(loss.detach() + bonus) + 0.0  # a loss of nothing is 0.0, not -0.0
    _check_finite(total, d_logprobs, terms)
    parts = {"loss_policy": policy, "loss_kl": kl, "loss_entropy": bonus}
    metrics = {name: float(part.detach()) + 0.0 for name, part in parts.items()}
    metrics |= _metrics(config, batch, terms, None if entropies is None else entropy)
    device = logprobs.device
    return LossResult(loss=total, d_logprobs=d_logprobs.to(device), d_entropies=d_entropies.to(device), metrics=metrics)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Terms:
    """What a loss may use, all [T] on the CPU in one dtype; only ``logp`` and what is made of it has a graph."""

    logp: Tensor
    log_ratio: Tensor  # logp - old; exactly 0 where old is absent and this is the first update
    ratio: Tensor  # the importance ratio in the loss: per token, or the response's in each of its tokens
    advantages: Tensor
    ref: Tensor | None
    response_index: Tensor
    num_responses: int

    @classmethod
    def of(cls, config: LossConfig, batch: LossBatch, logp: Tensor) -> _Terms:
        old = logp.detach() if batch.first_logprobs is None else _cpu(batch.first_logprobs, logp.dtype)
        if batch.old_logprobs is not None:
            old = torch.where(_cpu(batch.has_old, torch.bool), _cpu(batch.old_logprobs, logp.dtype), old)
        index = _cpu(batch.response_index, torch.int64)
        log_ratio = logp - old
        return cls(
            logp=logp,
            log_ratio=log_ratio,
            ratio=LOSSES[config.loss].ratio(log_ratio, index, batch.num_responses),
            advantages=_cpu(batch.advantages, logp.dtype),
            ref=None if batch.ref_logprobs is None else _cpu(batch.ref_logprobs, logp.dtype),
            response_index=index,
            num_responses=batch.num_responses,
        )


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """One row of the table of losses."""

    token_terms: Callable[[LossConfig, _Terms], Tensor]
    ratio: Callable[[Tensor, Tensor, int], Tensor]
    aggregation: str
    scale_advantages: bool = True


def _clipped(config: LossConfig, terms: _Terms) -> Tensor:
    """min(r A, clip(r) A), with r <= delta in the first."""
    low, high = config.ratio_range
    unclipped = terms.ratio if config.delta is None else terms.ratio.clamp(max=config.delta)
    return torch.minimum(unclipped * terms.advantages, terms.ratio.clamp(low, high) * terms.advantages)


def _weighted_logp(config: LossConfig, terms: _Terms) -> Tensor:
    """stop_gradient(clip(r)) A logp: clipping bounds a token's weight and never silences it."""
    low, high = config.ratio_range
    return terms.ratio.detach().clamp(low, high) * terms.advantages * terms.logp


def _token_ratio(log_ratio: Tensor, response_index: Tensor, num_responses: int) -> Tensor:
    return log_ratio.exp()


def _sequence_ratio(log_ratio: Tensor, response_index: Tensor, num_responses: int) -> Tensor:
    """The geometric mean of a response's token ratios, in each of its tokens."""
    sums = log_ratio.new_zeros(num_responses).index_add(0, response_index, log_ratio)
    means = sums / _tokens_per_response(response_index, num_responses)
    return means.exp().index_select(0, response_index)


LOSSES: dict[str, _Loss] = {
    "grpo": _Loss(token_terms=_clipped, ratio=_token_ratio, aggregation="seq-mean-token-mean"),
    "dapo": _Loss(token_terms=_clipped, ratio=_token_ratio, aggregation="token-mean"),
    "bnpo": _Loss(token_terms=_clipped, ratio=_token_ratio, aggregation="token-mean"),
    "dr_grpo": _Loss(
        token_terms=_clipped, ratio=_token_ratio, aggregation="seq-mean-token-sum-norm", scale_advantages=False
    ),
    "gspo": _Loss(token_terms=_clipped, ratio=_sequence_ratio, aggregation="seq-mean-token-mean"),
    "cispo": _Loss(token_terms=_weighted_logp, ratio=_token_ratio, aggregation="token-mean"),
}


def _each(batch: LossBatch, weight: float) -> Tensor:
    return torch.full((len(batch.response_index),), weight, dtype=torch.float64)


def _token_mean(config: LossConfig, batch: LossBatch) -> Tensor:
    return _each(batch, 1 / len(batch.response_index))


def _token_sum(config: LossConfig, batch: LossBatch) -> Tensor:
    return _each(batch, 1.0)


def _seq_mean_token_sum(config: LossConfig, batch: LossBatch) -> Tensor:
    return _each(batch, 1 / batch.num_responses)


def _seq_mean_token_mean(config: LossConfig, batch: LossBatch) -> Tensor:
    index = batch.response_index.cpu()
    tokens = _tokens_per_response(index, batch.num_responses).to(torch.float64)
    return (1 / (tokens * batch.num_responses)).index_select(0, index)


def _seq_mean_token_sum_norm(config: LossConfig, batch: LossBatch) -> Tensor:
    norm = config.max_response_tokens or batch.longest_response_tokens
    return _each(batch, 1 / (batch.num_responses * norm))


AGGREGATIONS: dict[str, Callable[[LossConfig, LossBatch], Tensor]] = {
    "token-mean": _token_mean,
    "token-sum": _token_sum,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": lambda difference: torch.expm1(-difference) + difference,
}


def _kl(config: LossConfig, terms: _Terms) -> Tensor:
    if config.kl is None or terms.ref is None:
        return torch.zeros_like(terms.logp)
    return KL_ESTIMATORS[config.kl](terms.logp - terms.ref)


def _tokens_per_response(response_index: Tensor, num_responses: int) -> Tensor:
    """[responses] trainable tokens, at least 1, so that a response without any divides nothing by zero."""
    return torch.bincount(response_index, minlength=num_responses).clamp(min=1)


@torch.no_grad()
def _metrics(config: LossConfig, batch: LossBatch, terms: _Terms, entropy: Tensor | None) -> dict[str, float]:
    ratio = terms.ratio.double()
    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        **_clip_fractions(config, terms.ratio, terms.advantages),
        "kl_old": KL_ESTIMATORS["k3"](-terms.log_ratio.double()).mean(),
        "advantage_mean": terms.advantages.double().mean(),
    }
    if terms.ref is not None:
        metrics["kl_ref"] = KL_ESTIMATORS[config.kl or "k3"](terms.logp.double() - terms.ref.double()).mean()
    if entropy is not None:
        metrics["entropy"] = entropy.double().mean()
    if batch.old_logprobs is not None:
        drift = terms.log_ratio[batch.has_old.cpu()].double().abs()
        metrics["old_logprob_drift_max"] = drift.max()
        metrics["old_logprob_drift_mean"] = drift.mean()
    counts = {"tokens": float(len(ratio)), "responses": float(batch.num_responses)}
    return {name: float(value) for name, value in metrics.items()} | counts


def _clip_fractions(config: LossConfig, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    low, high = config.ratio_range
    below, above = ratio < low, ratio > high
    if config.loss == "cispo":
        below, above = below & (advantages != 0), above & (advantages != 0)
    else:
        below, above = below & (advantages < 0), above & (advantages > 0)
    fractions = {"clip_fraction_low": below.double().mean(), "clip_fraction_high": above.double().mean()}
    if config.delta is not None:
        fractions["clip_fraction_delta"] = ((ratio > config.delta) & (advantages < 0)).double().mean()
    return fractions


def _check_inputs(config: LossConfig, batch: LossBatch, logprobs: Tensor, entropies: Tensor | None) -> None:
    shape = tuple(batch.response_index.shape)
    scored = {"logprobs": logprobs, "entropies": entropies}
    known = {"advantages": batch.advantages, "has_old": batch.has_old, "ref_logprobs": batch.ref_logprobs}
    known["first_logprobs"] = batch.first_logprobs
    for name, vector in {**scored, **known, "old_logprobs": batch.old_logprobs}.items():
        if vector is not None and tuple(vector.shape) != shape:
            raise UsageError(f"{name} has shape {tuple(vector.shape)}, but the batch has {shape[0]} trainable tokens")
    if shape[0] == 0:
        raise UsageError(f"none of the step's {batch.num_responses} responses has a trainable token")
    if config.kl is not None and batch.ref_logprobs is None:
        raise UsageError(
            f"kl={config.kl!r} needs ref_logprobs; give them with the rollouts (sampled responses have none)"
        )
    if config.entropy_bonus and entropies is None:
        raise UsageError(f"entropy_bonus={config.entropy_bonus!r} needs entropies; score them or set it to 0")
    for name, vector in scored.items():
        if vector is not None and not bool(torch.isfinite(vector).all()):
            token = int((~torch.isfinite(vector)).nonzero()[0])
            raise StageFailedError(
                f"{name} of the policy are not finite: {float(vector[token])} at trainable token {token} of the step "
                f"(response {int(batch.response_index[token])}); check the weights and the dtype"
            )


def _check_finite(loss: float, d_logprobs: Tensor, terms: _Terms) -> None:
    if math.isfinite(loss) and bool(torch.isfinite(d_logprobs).all()):
        return
    gaps = terms.log_ratio.detach()
    token = int(gaps.abs().argmax())
    raise UsageError(
        f"the loss or its derivative is not finite (loss={loss!r}); the largest gap between the policy's and the given "
        f"old log-probs is {float(gaps[token]):.1f} nats, at response {int(terms.response_index[token])} of the step: "
        "check that old_logprobs and ref_logprobs are natural logarithms, at this temperature, for these tokens"
    )


def _rows(groups: Sequence[Group], advantages: Sequence[GroupAdvantages]) -> list[tuple[str, Response, Advantage]]:
    if len(groups) != len(advantages):
        raise UsageError(f"advantages of {len(advantages)} groups are given for {len(groups)} groups")
    rows: list[tuple[str, Response, Advantage]] = []
    for group, values in zip(groups, (entry.values for entry in advantages), strict=True):
        if len(values) != len(group.responses):
            raise UsageError(f"{group.source}: {len(values)} advantages for {len(group.responses)} responses")
        for number, (response, value) in enumerate(zip(group.responses, values, strict=True)):
            place = f"{group.source}, response {number}"
            if isinstance(value, tuple) and len(value) != len(response.token_ids):
                raise UsageError(f"{place}: {len(value)} advantages for {len(response.token_ids)} tokens")
            rows.append((place, response, value))
    return rows


def _all_or_none_ref(rows: list[tuple[str, Response, Advantage]], num_ref: int, num_tokens: int) -> None:
    if num_ref in (0, num_tokens):
        return
    place = next(place for place, response, _ in rows if response.ref_logprobs is None and any(response.mask))
    raise UsageError(f"{place}: no ref_logprobs, but other responses have them; give them to all or to none")


def _leaf(vector: Tensor, dtype: torch.dtype) -> Tensor:
    return _cpu(vector, dtype).requires_grad_()


def _cpu(vector: Tensor, dtype: torch.dtype) -> Tensor:
    return vector.detach().to(device="cpu", dtype=dtype, copy=True)  # a copy may be saved for backward


def _known(name: str, value: str, names: Iterable[str]) -> None:
    if value not in names:
        raise UsageError(f"{name}={value!r} is not known; choose one of {', '.join(names)}")


def _number(name: str, value: object, low: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        need = "a finite number" if low < 0 else f"a finite number of at least {low:g}"
        raise UsageError(f"{name}={value!r} is not {need}")
    return float(value)


def _norm(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UsageError(f"max_response_tokens={value!r} is not a whole number of at least 1")
