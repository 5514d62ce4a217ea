"""Log-probabilities, entropies and their hand-written backward equal autograd's, whatever the block of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from models import head as heads

ROWS, HIDDEN, VOCABULARY = 7, 5, 13


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """Return a head, rows after the final norm, and targets."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    return head, torch.randn(ROWS, HIDDEN, dtype=dtype), torch.randint(VOCABULARY, (ROWS,))


def reference(
    head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(head(hidden) / temperature, -1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


@given(block_rows=st.integers(1, 9), temperature=st.sampled_from([0.3, 1.0, 1.7]), bias=st.booleans())
def test_scores_are_those_of_the_sampling_distribution(block_rows: int, temperature: float, bias: bool) -> None:
    head, hidden, targets = inputs(bias=bias)
    found = heads.score_rows(head, hidden, targets, temperature=temperature, block_rows=block_rows)
    for ours, theirs in zip(found, reference(head, hidden, targets, temperature), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@given(
    block_rows=st.integers(1, 9),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    bias=st.booleans(),
    entropies=st.booleans(),
)
def test_the_backward_equals_autograd_and_adds_to_its_accumulators(
    block_rows: int, temperature: float, bias: bool, entropies: bool
) -> None:
    head, hidden, targets = inputs(bias=bias)
    d_logps, d_entropies = torch.randn(2, ROWS, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    logps, entropy = reference(head, leaf, targets, temperature)
    ((d_logps * logps).sum() + (d_entropies * entropy).sum() * entropies).backward()

    weight, bias_sum = torch.ones(VOCABULARY, HIDDEN, dtype=torch.float64), torch.ones(VOCABULARY, dtype=torch.float64)
    d_hidden = heads.backward_rows(
        head,
        hidden,
        targets,
        d_logps,
        d_entropies if entropies else None,
        temperature=temperature,
        block_rows=block_rows,
        weight_gradient=weight,
        bias_gradient=bias_sum if bias else None,
    )
    assert leaf.grad is not None
    assert head.weight.grad is not None
    torch.testing.assert_close(d_hidden, leaf.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weight - 1, head.weight.grad, rtol=1e-12, atol=1e-12)
    if bias:
        torch.testing.assert_close(bias_sum - 1, head.bias.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scores_and_weight_gradients_are_at_least_float32(dtype: torch.dtype) -> None:
    head, hidden, targets = inputs(dtype)
    logps, entropies = heads.score_rows(head, hidden, targets, temperature=1.0, block_rows=2)
    assert logps.dtype is entropies.dtype is torch.float32
    weight = torch.zeros(VOCABULARY, HIDDEN)
    d_hidden = heads.backward_rows(
        head, hidden, targets, torch.ones(ROWS), None, temperature=1.0, block_rows=3, weight_gradient=weight,
        bias_gradient=None,
    )  # fmt: skip
    assert d_hidden.dtype is dtype
    exact = inputs(torch.float64)
    with torch.no_grad():
        exact[0].weight.copy_(head.weight)
    logits = exact[0](hidden.double())
    wanted = nn.functional.one_hot(targets, VOCABULARY) - torch.softmax(logits, -1)
    size = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(weight.double(), wanted.t() @ hidden.double(), rtol=size, atol=size)


def test_large_logits_neither_overflow_nor_lose_the_certain_token() -> None:
    head, hidden, targets = inputs(torch.float32)
    with torch.no_grad():
        head.weight.mul_(1e4)
    logps, entropies = heads.score_rows(head, hidden, head(hidden).argmax(-1), temperature=1.0, block_rows=4)
    assert torch.isfinite(logps).all()
    assert torch.isfinite(entropies).all()
    assert (logps <= 0).all()
    assert logps.max() > -1e-3
    assert torch.isfinite(heads.score_rows(head, hidden, targets, temperature=1.0, block_rows=4)[0]).all()
