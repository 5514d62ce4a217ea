"""Attention over pages equals one softmax over all visible tokens, forward and backward, however pages are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UnsupportedModelError
from models.attention import EmptyPrefix, paged_attention

KV_HEADS, HEAD_DIM = 2, 8


class Pages:
    """A prefix of pages held in a list, with cotangents summed beside them."""

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self.pages = list(pages)
        self.cotangents = [torch.zeros_like(page) for page in pages]
        self.token_counts = tuple(page.shape[2] for page in pages)

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self.pages[index]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        self.cotangents[index] += torch.cat([d_key, d_value])


class Layer(torch.nn.Module):
    layer_idx = 0


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    return paged_attention(Layer(), query, key, value, None, **options)[0]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """Softmax over the prefix ``[2, K, P, D]`` and the own tokens up to each, written out; result ``[B, S, H, D]``."""
    batch, heads, tokens, _ = query.shape
    groups = heads // KV_HEADS
    keys = torch.cat([prefix[0].expand(batch, -1, -1, -1), key], 2).repeat_interleave(groups, 1)
    values = torch.cat([prefix[1].expand(batch, -1, -1, -1), value], 2).repeat_interleave(groups, 1)
    scores = query @ keys.transpose(-1, -2) * HEAD_DIM**-0.5
    seen = torch.ones(tokens, keys.shape[2], dtype=torch.bool).tril(prefix.shape[2])
    out: torch.Tensor = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
    return out.transpose(1, 2)


def tensors(batch: int, tokens: int, pages: Sequence[int], groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return query, key, value, prefix and the output's gradient."""
    torch.manual_seed(batch + 10 * tokens + len(pages))
    heads = KV_HEADS * groups
    return [
        torch.randn(shape, dtype=torch.float64).to(dtype)
        for shape in (
            (batch, heads, tokens, HEAD_DIM),
            (batch, KV_HEADS, tokens, HEAD_DIM),
            (batch, KV_HEADS, tokens, HEAD_DIM),
            (2, KV_HEADS, sum(pages), HEAD_DIM),
            (batch, tokens, heads, HEAD_DIM),
        )
    ]


def differentiate(made: list[torch.Tensor], pages: Sequence[int] | None) -> list[torch.Tensor]:
    """Return output and gradients of query, key, value and prefix; ``pages`` None stands for the dense reference."""
    query, key, value, prefix = (tensor.clone().requires_grad_() for tensor in made[:4])
    if pages is None:
        out = dense(query, key, value, prefix)
        out.backward(made[4])
        d_prefix = prefix.grad
    else:
        held = Pages(list(prefix.detach().split(list(pages), 2)) if pages else [])
        out = attend(query, key, value, prefix=held)
        out.backward(made[4])
        d_prefix = torch.cat(held.cotangents, 2) if pages else torch.zeros_like(prefix)
    grads = [query.grad, key.grad, value.grad, d_prefix]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    pages=st.lists(st.integers(1, 7), max_size=4),
    groups=st.sampled_from([1, 3]),
)
def test_output_and_gradients_equal_a_dense_softmax(batch: int, tokens: int, pages: list[int], groups: int) -> None:
    made = tensors(batch, tokens, pages, groups, torch.float64)
    for ours, theirs in zip(differentiate(made, pages), differentiate(made, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_pages_are_no_less_exact_than_one(dtype: torch.dtype) -> None:
    pages = [16] * 20
    made = tensors(2, 24, pages, 2, dtype)
    truth = differentiate([tensor.double() for tensor in made], None)

    def errors(cut: Sequence[int]) -> list[float]:
        found = differentiate(made, cut)
        return [float((ours - exact).norm() / exact.norm()) for ours, exact in zip(found, truth, strict=True)]

    one, many = errors([sum(pages)]), errors(pages)
    assert all(cut <= 1.5 * whole for cut, whole in zip(many, one, strict=True)), (one, many)


def test_a_prefix_far_more_likely_than_the_own_tokens_does_not_overflow() -> None:
    made = tensors(1, 3, [4], 1, torch.float32)
    made[0], made[3] = made[0] * 40, made[3] * 40
    assert all(torch.isfinite(tensor).all() for tensor in differentiate(made, [4]))


def test_the_scale_given_by_the_layer_is_used() -> None:
    query, key, value, _, _ = tensors(1, 5, [], 1, torch.float64)
    torch.testing.assert_close(attend(query, key, value, scaling=0.5), attend(query * 0.5 * HEAD_DIM**0.5, key, value))


@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.1}, {"sliding_window": 4}, {"softcap": 30.0}, {"s_aux": torch.ones(2)}, {"something_new": 1}],
    ids=str,
)
def test_what_it_does_not_do_is_refused_by_name(options: dict[str, Any]) -> None:
    query, key, value, _, _ = tensors(1, 3, [], 1, torch.float32)
    with pytest.raises(UnsupportedModelError, match=next(iter(options))):
        attend(query, key, value, **options)


def test_a_mask_is_refused() -> None:
    query, key, value, _, _ = tensors(1, 3, [], 1, torch.float32)
    with pytest.raises(UnsupportedModelError, match="mask=True"):
        paged_attention(Layer(), query, key, value, torch.ones(1, 1, 3, 3, dtype=torch.bool))


def test_an_empty_prefix_has_no_pages() -> None:
    with pytest.raises(IndexError, match="no pages"):
        EmptyPrefix().page(0, 0)
    with pytest.raises(IndexError, match="no pages"):
        EmptyPrefix().add_cotangent(0, 0, torch.zeros(1), torch.zeros(1))
