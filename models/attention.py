"""Causal attention over a long prefix that is kept in pages.

Shapes: B branches, H query heads, K key/value heads, S query tokens, T tokens of a page, D head dimension.

Own tokens attend causally to each other; every prefix page is attended to without a mask; the partial results are
merged by log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1; the split is that of Flash-Decoding). The
backward calls the kernel's own backward (`models.kernels`) with the *merged* output and log-sum-exp, page by page,
which is exact since the softmax probabilities depend on the page only through them. Gradients of a page's keys and
values go straight to its cotangent page; the gradient of the queries is summed over pages in float32 (or float64).

Invariants: pages are never concatenated and never expanded over branches (branches are folded into the query axis,
the prefix has batch one); at most one page and one cotangent page are on the device besides those that live there.

When a branch is decoded token by token, its own earlier keys and values come with those of the one query token: that
token sees all of them, so no mask is needed either.

The function is registered in transformers' attention registry under `ATTENTION_NAME`; a decoder layer hands it the
prefix because the layer's cache object puts it into the keyword arguments (see `models.dense`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from engine.device_kind import DeviceKind
from engine.errors import UnsupportedModelError
from models.float64 import accumulation_dtype
from models.kernels import AttentionKernels, attention_kernels, fold

ATTENTION_NAME = "longstraw_pages"

_HARMLESS_ARGUMENTS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions", "is_causal"})
# Keyword arguments that decoder layers pass along and that do not change what attention computes here.


class Prefix(Protocol):
    """The pages that a chunk attends to, oldest first."""

    @property
    def token_counts(self) -> Sequence[int]:
        """The number of valid tokens of each page."""

    def page(self, layer: int, index: int) -> torch.Tensor:
        """Return keys and values of the valid tokens of a page, ``[2, K, T, D]``; good until the next call."""

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        """Add the gradients ``[1, K, T, D]`` of a page's keys and values to its cotangent."""


class OwnState(Protocol):
    """The keys and values of the tokens that a batch of branches has decoded so far."""

    def append(self, layer: int, key_BK1D: torch.Tensor, value_BK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep those of one more token and return all, ``[B, K, T, D]`` each."""


class AttentionResults(Protocol):
    """What attention gave in a chunk's forward, kept for the same chunk's backward."""

    def keep(self, layer: int, out_BHSD: torch.Tensor, lse_BHS: torch.Tensor) -> None:
        """Keep a layer's output, in the compute dtype, and log-sum-exp, in the accumulation dtype."""

    def recall(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what was kept of a layer, good until the next call; None where there is nothing to recall."""


class EmptyPrefix:
    """The prefix of the first chunk: no pages."""

    token_counts: tuple[int, ...] = ()

    def page(self, layer: int, index: int) -> torch.Tensor:
        raise IndexError("an empty prefix has no pages")

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        raise IndexError("an empty prefix has no pages")


def _unfold(x_1HBSD: torch.Tensor, batch: int) -> torch.Tensor:
    """Undo `models.kernels.fold`."""
    if batch == 1:
        return x_1HBSD
    heads = x_1HBSD.shape[1]
    return x_1HBSD.view(heads, batch, -1, *x_1HBSD.shape[3:]).transpose(0, 1)


def _own_is_causal(q_BHSD: torch.Tensor, k_BKTD: torch.Tensor) -> bool:
    """Return whether own tokens are masked: those of a chunk are, the one query of a decode step sees all."""
    return q_BHSD.shape[2] == k_BKTD.shape[2]


def _attend(
    kernels: AttentionKernels,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: Prefix,
    layer: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's output ``[B, H, S, D]`` and its log-sum-exp ``[B, H, S]`` in the accumulation dtype.

    Partial results merge as weighted means: a page weighs exp(its log-sum-exp - the merged one).
    """
    wide = accumulation_dtype(q.dtype)
    out, lse = kernels.forward(q, k, v, _own_is_causal(q, k), scale)
    out, lse = out.to(wide), lse.to(wide)
    q_folded = kernels.folded(q) if prefix.token_counts else q
    for index in range(len(prefix.token_counts)):
        page = prefix.page(layer, index)
        page_out, page_lse = kernels.forward(q_folded, page[0:1], page[1:2], False, scale)
        page_out, page_lse = _unfold(page_out.to(wide), q.shape[0]), _unfold(page_lse.to(wide), q.shape[0])
        merged = torch.logaddexp(lse, page_lse)
        out.lerp_(page_out, page_lse.sub_(merged).exp_().unsqueeze(-1))
        lse = merged
        del page, page_out, page_lse, merged  # or they would stand beside the next page's
    return out.to(q.dtype), lse


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prefix: Prefix,
        results: AttentionResults | None,
        layer: int,
        scale: float,
        kernels: AttentionKernels,
    ) -> torch.Tensor:
        known = None if results is None else results.recall(layer)
        out, lse = _attend(kernels, q, k, v, prefix, layer, scale) if known is None else known
        if results is not None and known is None:
            results.keep(layer, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.prefix, ctx.layer, ctx.scale, ctx.kernels = prefix, layer, scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        prefix, layer, scale = ctx.prefix, ctx.layer, ctx.scale
        kernels = cast(AttentionKernels, ctx.kernels)
        d_out = kernels.received(grad_outputs[0])
        d_q, d_k, d_v = kernels.backward(d_out, q, k, v, out, lse, _own_is_causal(q, k), scale)
        if not prefix.token_counts:
            return d_q, d_k, d_v, None, None, None, None, None
        d_q_sum = d_q.to(accumulation_dtype(q.dtype))
        del d_q
        folded = [*(kernels.folded(x) for x in (d_out, q, out)), fold(lse)]
        for index in range(len(prefix.token_counts)):
            page = prefix.page(layer, index)
            d_q_page, d_key, d_value = kernels.backward(
                folded[0], folded[1], page[0:1], page[1:2], folded[2], folded[3], False, scale
            )
            d_q_sum.add_(_unfold(d_q_page, q.shape[0]))
            prefix.add_cotangent(layer, index, d_key, d_value)
            del page, d_q_page, d_key, d_value
        return d_q_sum.to(q.dtype), d_k, d_v, None, None, None, None, None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    prefix: Prefix | None = None,
    results: AttentionResults | None = None,
    kind: DeviceKind | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query [B, H, S, D]`` to itself causally and to all of ``prefix``; result ``[B, S, H, D]``.

    ``results`` are recalled instead of computed again where there are any, and kept otherwise. ``kind`` is the kind of
    device that tensors without data stand for (`models.kernels.attention_kernels`).

    The signature is that of transformers' attention registry. Keys and values are ``[B, K, S, D]``, or
    ``[B, K, T, D]`` behind one query token, which sees all T of them.

    Raises:
        UnsupportedModelError: the layer asks for something that this attention does not do: dropout, a mask, a
            sliding window, soft-capped scores, attention sinks, an argument of unknown meaning, or several queries
            with other own keys than theirs.
    """
    unknown = {n: v for n, v in others.items() if v is not None and v is not False and n not in _HARMLESS_ARGUMENTS}
    if dropout or attention_mask is not None or unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for something that attention over pages does not do: "
            f"dropout={dropout!r} mask={attention_mask is not None} {unknown}; use a model with plain causal attention"
        )
    if query.shape[2] not in (1, key.shape[2]):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {query.shape[2]} queries to {key.shape[2]} own keys; attention over "
            "pages takes as many keys as queries, or one query"
        )
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    layer = cast(int, getattr(module, "layer_idx", 0))
    kernels = attention_kernels(query, kind)
    out = _PagedAttention.apply(query, key, value, prefix or EmptyPrefix(), results, layer, scale, kernels)
    return cast(torch.Tensor, out).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
