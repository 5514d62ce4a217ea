"""Log-probabilities of chosen tokens, forward and backward, and the choice of tokens, in blocks of rows.

Shapes: R rows, V vocabulary, C hidden size.

With logits z = W h / temperature, the log-probability of token y is z_y - logsumexp(z), and the entropy is
logsumexp(z) - sum_j p_j z_j with p = softmax(z). Their derivatives by z are onehot(y) - p and
-p_j (z_j - logsumexp(z) + entropy). They are written out by hand, so that at most two [block, V] matrices exist, in
either direction, and the weight's gradient goes straight into its accumulator.

A token is chosen by the inverse of the cumulative distribution, summed over the vocabulary in the order of ids in
float64: the first id whose sum exceeds u times the total, u in [0, 1). An id of probability zero adds nothing to the
sum and is never the first.
"""

from __future__ import annotations

import torch
from torch import nn

from models.float64 import accumulation_dtype


def _logits(head: nn.Linear, hidden_RC: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``[R, V]`` logits at ``temperature``, in float32 or the compute dtype where that is wider."""
    logits_RV: torch.Tensor = head(hidden_RC).to(accumulation_dtype(hidden_RC.dtype))
    return _at_temperature(logits_RV, temperature)


def _at_temperature(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits_RV if temperature == 1.0 else logits_RV.div_(temperature)


def _log_partition(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return ``[R]`` log-sum-exp with one ``[R, V]`` temporary."""
    top_R1 = logits_RV.amax(-1, keepdim=True)
    return (logits_RV - top_R1).exp_().sum(-1).log_().add_(top_R1.squeeze(-1))


@torch.no_grad()
def score_rows(
    head: nn.Linear, hidden_RC: torch.Tensor, targets_R: torch.Tensor, *, temperature: float, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of ``targets_R`` and entropies, both ``[R]``, in the accumulation dtype.

    ``hidden_RC`` are the rows after the final norm; ``targets_R`` is int64.
    """
    wide = accumulation_dtype(hidden_RC.dtype)
    logps_R = torch.empty(hidden_RC.shape[0], dtype=wide, device=hidden_RC.device)
    entropies_R = torch.empty_like(logps_R)
    for start in range(0, hidden_RC.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        logits_RV = _logits(head, hidden_RC[rows], temperature)
        lse_R = _log_partition(logits_RV)
        logps_R[rows] = logits_RV.gather(1, targets_R[rows, None]).squeeze(1).sub_(lse_R)
        probs_RV = (logits_RV - lse_R[:, None]).exp_()
        entropies_R[rows] = lse_R - probs_RV.mul_(logits_RV).sum(-1)
        del logits_RV, probs_RV  # or the next block's would stand beside these
    return logps_R, entropies_R


@torch.no_grad()
def sample_rows(
    head: nn.Linear,
    hidden_RC: torch.Tensor,
    uniforms_R: torch.Tensor,
    *,
    temperature: float,
    greedy: bool,
    block_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each row, int64 ``[R]``, and its log-probability in the accumulation dtype, ``[R]``.

    ``hidden_RC`` are the rows after the final norm; ``uniforms_R`` are float64 numbers in [0, 1), unused when
    ``greedy``: then the token is the first of the largest logits. The log-probability is that of `score_rows`, at
    ``temperature`` in either case; it is no number where the logits are none.
    """
    ids_R = torch.empty(hidden_RC.shape[0], dtype=torch.int64, device=hidden_RC.device)
    logps_R = torch.empty(hidden_RC.shape[0], dtype=accumulation_dtype(hidden_RC.dtype), device=hidden_RC.device)
    for start in range(0, hidden_RC.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        logits_RV = _logits(head, hidden_RC[rows], 1.0)
        if greedy:  # before the temperature, which could round two logits to one
            ids_R[rows] = logits_RV.argmax(-1)
        logits_RV = _at_temperature(logits_RV, temperature)
        logits_RV.sub_(_log_partition(logits_RV)[:, None])
        if not greedy:
            ids_R[rows] = _inverse_cdf(logits_RV, uniforms_R[rows])
        logps_R[rows] = logits_RV.gather(1, ids_R[rows, None]).squeeze(1)
        del logits_RV
    return ids_R, logps_R


def _inverse_cdf(logps_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Return the id in each row at which the cumulative probability first exceeds ``uniforms_R``, int64 ``[R]``."""
    sums_RV = logps_RV.to(torch.float64, copy=True).exp_()
    sums_RV.cumsum_(-1)
    targets_R1 = (uniforms_R * sums_RV[:, -1])[:, None]
    ids_R = torch.searchsorted(sums_RV, targets_R1, right=True).squeeze(1)
    return ids_R.clamp_(max=sums_RV.shape[1] - 1)  # out of range only where the logits are no numbers


@torch.no_grad()
def backward_rows(
    head: nn.Linear,
    hidden_RC: torch.Tensor,
    targets_R: torch.Tensor,
    d_logps_R: torch.Tensor,
    d_entropies_R: torch.Tensor | None,
    *,
    temperature: float,
    block_rows: int,
    weight_gradient: torch.Tensor,
    bias_gradient: torch.Tensor | None,
) -> torch.Tensor:
    """Add the head's gradients to its accumulators and return the gradient of ``hidden_RC``, same shape and dtype.

    ``d_logps_R`` and ``d_entropies_R`` are the loss's derivatives by the quantities of `score_rows`, in the
    accumulation dtype; None for entropies that the loss does not use. ``weight_gradient`` is ``[V, C]``,
    ``bias_gradient`` ``[V]`` or None, both in the accumulation dtype.
    """
    wide = accumulation_dtype(hidden_RC.dtype)
    d_hidden_RC = torch.empty_like(hidden_RC)
    for start in range(0, hidden_RC.shape[0], block_rows):
        rows = slice(start, start + block_rows)
        logits_RV = _logits(head, hidden_RC[rows], temperature)
        lse_R = _log_partition(logits_RV)
        d_logits_RV = (logits_RV - lse_R[:, None]).exp_()
        if d_entropies_R is None:
            d_logits_RV.mul_(-d_logps_R[rows, None])
        else:
            entropy_R = lse_R - torch.linalg.vecdot(d_logits_RV, logits_RV)
            logits_RV.sub_((lse_R - entropy_R)[:, None]).mul_(d_entropies_R[rows, None]).add_(d_logps_R[rows, None])
            d_logits_RV.mul_(logits_RV).neg_()
        del logits_RV
        d_logits_RV.scatter_add_(1, targets_R[rows, None], d_logps_R[rows, None])
        if temperature != 1.0:
            d_logits_RV.div_(temperature)
        weight_gradient.addmm_(d_logits_RV.t(), hidden_RC[rows].to(wide))
        if bias_gradient is not None:
            bias_gradient.add_(d_logits_RV.sum(0))
        d_hidden_RC[rows] = d_logits_RV.to(hidden_RC.dtype) @ head.weight
        del d_logits_RV
    return d_hidden_RC
