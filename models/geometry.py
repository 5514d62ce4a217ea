"""Sizes and costs of a dense decoder, from its configuration alone.

FLOPs count a multiply-add as two. A chunk of R rows (branches times tokens) with N visible prefix tokens costs, per
forward, 2 R times the parameters of the layers plus 4 R (N + S/2) H D a layer for attention (scores and weighted
sum, causal within the chunk). A backward is twice a forward; with one pass that stores layer inputs and one
recomputation per layer, a swept chunk costs four forwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from engine.plan import Cost
from engine.tensors import dtype_name
from models.float64 import accumulation_dtype

_KERNELS_A_LAYER = 45
_KERNELS_A_PAGE = 10
_KERNELS_A_CHOICE = 30
# Operators that one layer, one prefix page and the choice of a token dispatch in a forward, counted on Llama; they only
# set the fixed cost.


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What planning needs to know of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_parameters: int
    item_bytes: int

    def forward_cost(self, *, rows: int, tokens: int, prefix_tokens: int, pages: int) -> Cost:
        """Return the cost of evaluating ``rows`` rows of chunks of ``tokens`` tokens behind a prefix."""
        attention = 4.0 * rows * (prefix_tokens + tokens / 2) * self.heads * self.head_dim * self.layers
        return Cost(
            flops=2.0 * rows * self.layer_parameters + attention,
            moved_bytes=float(self.layer_parameters * self.item_bytes),
            num_kernels=self.layers * (_KERNELS_A_LAYER + _KERNELS_A_PAGE * pages),
        )

    def backward_cost(self, *, rows: int, tokens: int, prefix_tokens: int, pages: int) -> Cost:
        """Return the cost of a recomputed backward: four forwards."""
        once = self.forward_cost(rows=rows, tokens=tokens, prefix_tokens=prefix_tokens, pages=pages)
        return once + once + once + once

    def decode_cost(self, *, branches: int, steps: int, prefix_tokens: int, pages: int) -> Cost:
        """Return the cost of decoding ``steps`` tokens of each branch one by one, with a choice from the head each.

        A step reads all weights, every prefix page once for all branches, and each branch's own tokens so far.
        """
        own_tokens = branches * steps * (steps + 1) / 2
        attended = branches * steps * prefix_tokens + own_tokens
        head_parameters = self.vocab * self.hidden
        token_bytes = 2 * self.kv_heads * self.head_dim * self.layers * self.item_bytes
        step_bytes = (self.layer_parameters + head_parameters) * self.item_bytes + prefix_tokens * token_bytes
        return Cost(
            flops=2.0 * branches * steps * (self.layer_parameters + head_parameters)
            + 4.0 * attended * self.heads * self.head_dim * self.layers,
            moved_bytes=float(steps * step_bytes + own_tokens * token_bytes),
            num_kernels=steps * (self.layers * (_KERNELS_A_LAYER + _KERNELS_A_PAGE * pages) + _KERNELS_A_CHOICE),
        )

    def head_cost(self, *, rows: int, backward: bool) -> Cost:
        """Return the cost of scoring rows, or of pulling their derivatives back."""
        once = 2.0 * rows * self.vocab * self.hidden
        return Cost(flops=once * (3 if backward else 1), num_kernels=10)


def geometry(config: PreTrainedConfig, *, layer_parameters: int, dtype: torch.dtype) -> Geometry:
    """Return the geometry of a dense decoder."""
    heads = int(config.num_attention_heads)
    return Geometry(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        layer_parameters=layer_parameters,
        item_bytes=dtype.itemsize,
    )


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Sizes of paged state: keys and values of every layer, ``page_tokens`` tokens to a page.

    ``dtype`` is the compute dtype, ``cotangent_dtype`` the accumulation dtype, by name.
    """

    layers: int
    heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    cotangent_dtype: str


def state_layout(sizes: Geometry, *, dtype: torch.dtype, page_tokens: int) -> StateLayout:
    """Return the layout of a dense decoder's state."""
    return StateLayout(
        layers=sizes.layers,
        heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_tokens=page_tokens,
        dtype=dtype_name(dtype),
        cotangent_dtype=dtype_name(accumulation_dtype(dtype)),
    )
