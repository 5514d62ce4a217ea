"""Sizes and costs of a decoder, from its configuration alone.

FLOPs count a multiply-add as two. R rows (branches times tokens) behind N visible prefix tokens, in chunks of S tokens,
see R (N + S/2) pairs of query and key a head. With head dimension D a pair costs an attention kernel 4 D FLOPs in the
forward (scores and weighted sum) and 10 D in the backward, which makes the scores again.

Traffic counts every operand once: weights that products read (by themselves, as `Cost.weight_bytes`), the ends of
matrix products, and the elementwise passes in the constants below. They and the numbers of operators were counted on
transformers' Llama layers; `tests/unit/test_geometry.py` counts again.

A chunk's backward is, per layer, a forward with autograd and its derivative, and before that one more forward through
all layers for their inputs, unless those were kept. Where no row meets the head, the last layer runs no further than
its keys and values.

Shapes: C hidden size, I size inside the feed-forward, Q all query heads' dimensions, K all key heads', V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from engine.plan import Cost
from engine.tensors import dtype_name
from models.float64 import accumulation_dtype
from models.gated_delta import BLOCK_TOKENS, PIECE_TOKENS, BoundaryLayout, boundary_layout, recurrent_layers

_KERNELS_A_CHUNK = 16
_KERNELS_A_LAYER, _KERNELS_A_STATE_LAYER, _KERNELS_A_PAGE = 69, 40, 9
_KERNELS_A_HEAD_BLOCK, _KERNELS_A_CHOICE = 25, 30
# Operators of a forward: embedding and positions, a layer, a layer up to its keys and values, attention to one prefix
# page, a block of rows at the head, the choice of a token.
_BACKWARD_KERNELS_A_CHUNK = 8
_BACKWARD_KERNELS_A_LAYER, _BACKWARD_KERNELS_A_STATE_LAYER, _BACKWARD_KERNELS_A_PAGE = 152, 66, 11
# The same of the derivative, the recomputation not included.
_DECODE_KERNELS_A_LAYER, _DECODE_KERNELS_A_PAGE = 10, 5
# More than of a forward, where each branch's own tokens so far are one more piece of state.

_RECURRENT_KERNELS, _RECURRENT_KERNELS_A_BLOCK, _RECURRENT_KERNELS_A_PIECE = 19, 37, 88
_BACKWARD_RECURRENT_KERNELS, _BACKWARD_RECURRENT_KERNELS_A_BLOCK, _BACKWARD_RECURRENT_KERNELS_A_PIECE = 53, 54, 156
_DECODE_RECURRENT_KERNELS = 66
_GATE_KERNELS, _BACKWARD_GATE_KERNELS = 33, 48
# Operators of a recurrent layer beyond those of a layer without its attention, and of its derivative; of a layer with
# attention what it has more there than in a dense decoder.
_RECURRENT_PASSES, _RECURRENT_SQUARE_PASSES, _DECODE_MATRIX_PASSES = 12, 12, 8
_BACKWARD_RECURRENT_PASSES, _BACKWARD_RECURRENT_SQUARE_PASSES = 40, 50
# Times that one element of queries, keys, values and convolved channels is read or written, one of the products of a
# block's keys with each other, and, in decoding, one of the matrices; fitted to twenty shapes, within a fifth.

_NORM_PASSES, _RESIDUAL_PASSES, _ROTARY_PASSES, _ACTIVATION_PASSES = 7, 3, 10, 5
# Times that one element is read or written: a root-mean-square norm squares, averages, scales and weighs (in float32),
# a residual reads two and writes one, rotary turns halves around, silu and its product read three and write two.
_MERGE_PASSES, _BACKWARD_PAGE_PASSES = 9, 7
# Of queries at one page: read, result written, two results scaled and added; in the backward two gradients more.
_BACKWARD_TRAFFIC = 2
# Traffic of a layer's derivative in units of its forward's: it reads what the forward read, and writes as much again.
_BACKWARD_SCORES = 4
# What the softmax costs in the backward kernel, in units of the forward's: made again, times its gradient, both stored.
_SCORE_PASSES, _SCORE_BACKWARD_PASSES = 15, 16
# Times that one logit is read or written (`models.head`).


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What planning needs to know of a model.

    ``layer_parameters`` are those of all layers together; ``recurrent_layers`` how many of them are recurrent, of which
    each leaves a ``boundary``, and ``last_is_recurrent`` whether the last one is.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_parameters: int
    item_bytes: int
    recurrent_layers: int = 0
    last_is_recurrent: bool = False
    boundary: BoundaryLayout | None = None

    # Sizes

    @property
    def attention_layers(self) -> int:
        return self.layers - self.recurrent_layers

    @property
    def query_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_dim(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element in the accumulation dtype: float32, or the compute dtype where that is wider."""
        return max(4, self.item_bytes)

    @property
    def _state_parameters(self) -> int:
        """Parameters of a layer that its keys and values need; modules compute the queries along with them."""
        return self.hidden * (self.query_dim + 2 * self.key_dim)

    @property
    def _parameters(self) -> float:
        return self.layer_parameters / self.layers

    @property
    def _inner(self) -> float:
        """Size inside the feed-forward, of three matrices."""
        attention = self._state_parameters + self.query_dim * self.hidden
        return max(0.0, (self._parameters - attention) / (3 * self.hidden))

    # Parts of a cost

    def _row_bytes(self) -> tuple[float, float]:
        """Return the traffic of a row through a whole layer, and through one up to its keys and values."""
        hidden, query, key, inner = self.hidden, self.query_dim, self.key_dim, self._inner
        norm = _NORM_PASSES * hidden * self.wide_bytes
        state = (_ROTARY_PASSES + 1) * (query + key) + 3 * hidden + 4 * key
        rest = 2 * _RESIDUAL_PASSES * hidden + 6 * query + 4 * hidden + (_ACTIVATION_PASSES + 3) * inner
        return 2 * norm + (state + rest) * self.item_bytes, norm + state * self.item_bytes

    def _layers_cost(self, rows: int, *, whole: int, state_only: int) -> Cost:
        """Return the cost of a forward through layers, without attention to the prefix and the embedding."""
        whole_bytes, state_bytes = self._row_bytes()
        parameters = whole * self._parameters + state_only * self._state_parameters
        return Cost(
            flops=2.0 * rows * parameters,
            moved_bytes=rows * (whole * whole_bytes + state_only * state_bytes),
            weight_bytes=parameters * self.item_bytes,
            num_kernels=whole * _KERNELS_A_LAYER + state_only * _KERNELS_A_STATE_LAYER,
        )

    def _derivative_cost(self, rows: int, *, whole: int, state_only: int) -> Cost:
        """Return the cost of differentiating what `_layers_cost` does, with the sums of the parameters' gradients."""
        forward = self._layers_cost(rows, whole=whole, state_only=state_only)
        parameters = whole * self._parameters + state_only * self._state_parameters
        gradient_bytes = parameters * (3 * self.item_bytes + 2 * self.wide_bytes)  # made, passed on, read, and added
        return Cost(
            flops=2.0 * forward.flops,
            moved_bytes=_BACKWARD_TRAFFIC * forward.moved_bytes + gradient_bytes,
            weight_bytes=forward.weight_bytes,
            num_kernels=whole * _BACKWARD_KERNELS_A_LAYER + state_only * _BACKWARD_KERNELS_A_STATE_LAYER,
        )

    def _whole_layers(self, *, through_last: bool) -> tuple[int, int]:
        """Return how many layers with attention run whole, and how many recurrent ones."""
        stops = not through_last
        return (
            self.attention_layers - (stops and not self.last_is_recurrent),
            self.recurrent_layers - (stops and self.last_is_recurrent),
        )

    def _gates_cost(self, layers: int, *, differentiated: int) -> Cost:
        """Return the operators of what attention beside recurrent layers has more: gates, norms of queries and keys."""
        if self.boundary is None:
            return Cost()
        return Cost(num_kernels=float(_GATE_KERNELS * layers + _BACKWARD_GATE_KERNELS * differentiated))

    def _recurrence_cost(self, rows: int, tokens: int, layers: int) -> Cost:
        """Return the cost of the gated delta rule and its convolution in the forward of so many layers.

        In blocks of c tokens (Gated Delta Networks, arXiv 2412.06464, section 3.3, as transformers' torch code does
        it): a token and head have c (2 K + V) products with the block's keys and its corrected values, c K to solve for
        them, and 3 K V with the matrix that the block begins with. Everything is in the accumulation dtype.
        """
        if self.boundary is None or not layers:
            return Cost()
        (heads, keys, values), (channels, columns) = self.boundary.recurrent_shape, self.boundary.conv_shape
        block = BLOCK_TOKENS
        products = block * (3 * keys + values) + 3 * keys * values
        elements, squares = self._recurrence_elements(rows, tokens)
        own = Cost(
            flops=2.0 * rows * (heads * products + channels * (columns + 1)),
            moved_bytes=self.wide_bytes * (_RECURRENT_PASSES * elements + _RECURRENT_SQUARE_PASSES * squares),
            num_kernels=_RECURRENT_KERNELS
            + _RECURRENT_KERNELS_A_BLOCK * -(-tokens // block)
            + _RECURRENT_KERNELS_A_PIECE * -(-tokens // PIECE_TOKENS),
        )
        return own.times(layers)

    def _recurrence_elements(self, rows: int, tokens: int) -> tuple[float, float]:
        """Return the elements of queries, keys, values and convolved channels, and of products within blocks."""
        assert self.boundary is not None
        (heads, keys, values), (channels, _) = self.boundary.recurrent_shape, self.boundary.conv_shape
        blocks = rows / tokens * -(-tokens // BLOCK_TOKENS)
        return rows * (2.0 * heads * (keys + values) + 2 * channels), blocks * heads * BLOCK_TOKENS**2

    def _recurrence_derivative_cost(self, rows: int, tokens: int, layers: int) -> Cost:
        """Return what differentiating that takes, the recomputation not included."""
        if self.boundary is None or not layers:
            return Cost()
        elements, squares = self._recurrence_elements(rows, tokens)
        passes = _BACKWARD_RECURRENT_PASSES * elements + _BACKWARD_RECURRENT_SQUARE_PASSES * squares
        return Cost(
            flops=2.0 * self._recurrence_cost(rows, tokens, layers).flops,
            moved_bytes=layers * self.wide_bytes * passes,
            num_kernels=layers
            * (
                _BACKWARD_RECURRENT_KERNELS
                + _BACKWARD_RECURRENT_KERNELS_A_BLOCK * -(-tokens // BLOCK_TOKENS)
                + _BACKWARD_RECURRENT_KERNELS_A_PIECE * -(-tokens // PIECE_TOKENS)
            ),
        )

    def _attention_cost(self, *, pairs: float, rows: int, prefix_tokens: float, pages: float, layers: int) -> Cost:
        """Return the cost of attention where ``pairs`` of query and key meet in each head of ``layers`` layers."""
        page_bytes = 2 * prefix_tokens * self.key_dim * self.item_bytes
        return Cost(
            attention_flops=4.0 * pairs * self.query_dim * layers,
            attention_scores=pairs * self.heads * layers,
            moved_bytes=layers * (pages * _MERGE_PASSES * rows * self.query_dim * self.wide_bytes + page_bytes),
            num_kernels=float(layers * pages * _KERNELS_A_PAGE),
        )

    def _attention_derivative_cost(self, *, pairs: float, rows: int, prefix_tokens: float, pages: float) -> Cost:
        """Return what a layer's attention costs in the backward."""
        page_bytes = 2 * prefix_tokens * self.key_dim * (2 * self.item_bytes + 3 * self.wide_bytes)
        return Cost(
            attention_backward_flops=10.0 * pairs * self.query_dim,
            attention_scores=_BACKWARD_SCORES * pairs * self.heads,
            moved_bytes=pages * _BACKWARD_PAGE_PASSES * rows * self.query_dim * self.wide_bytes + page_bytes,
            num_kernels=float(pages * _BACKWARD_KERNELS_A_PAGE),
        )

    # Stages

    def forward_cost(
        self, *, rows: int, tokens: int, prefix_tokens: float, pages: float, through_last: bool = True
    ) -> Cost:
        """Return the cost of evaluating ``rows`` rows of chunks of ``tokens`` tokens behind a prefix.

        Without ``through_last`` the last layer stops at its state.
        """
        whole = self.layers if through_last else self.layers - 1
        attending, _ = self._whole_layers(through_last=through_last)
        pairs = rows * (prefix_tokens + tokens / 2)
        body = self._layers_cost(rows, whole=whole, state_only=self.layers - whole)
        attention = self._attention_cost(
            pairs=pairs, rows=rows, prefix_tokens=prefix_tokens, pages=pages, layers=attending
        )
        recurrence = self._recurrence_cost(rows, tokens, self.recurrent_layers)
        recurrence += self._gates_cost(self.attention_layers, differentiated=0)
        return body + attention + recurrence + Cost(num_kernels=_KERNELS_A_CHUNK)

    def backward_cost(
        self,
        *,
        rows: int,
        tokens: int,
        prefix_tokens: float,
        pages: float,
        through_last: bool = True,
        again: int,
        recalls_attention: bool,
    ) -> Cost:
        """Return the cost of a recomputed backward.

        Before it, ``again`` layers run forward for the inputs of the layers behind them, which were not kept. With
        ``recalls_attention`` the results of attention were kept.
        """
        whole = self.layers if through_last else self.layers - 1
        attending, _ = self._whole_layers(through_last=through_last)
        again_attending, again_recurrent = self._whole_layers(through_last=again == self.layers) if again else (0, 0)
        pairs = rows * (prefix_tokens + tokens / 2)
        inputs = self._layers_cost(rows, whole=again, state_only=0)
        recomputed = self._layers_cost(rows, whole=whole, state_only=self.layers - whole)
        derivative = self._derivative_cost(rows, whole=whole, state_only=self.layers - whole)
        attention = self._attention_cost(
            pairs=pairs,
            rows=rows,
            prefix_tokens=prefix_tokens,
            pages=pages,
            layers=again_attending + (0 if recalls_attention else attending),
        )
        gates = self._gates_cost(self.attention_layers + again_attending, differentiated=self.attention_layers)
        recurrence = self._recurrence_cost(rows, tokens, again_recurrent + self.recurrent_layers) + gates
        recurrence += self._recurrence_derivative_cost(rows, tokens, self.recurrent_layers)
        backward = self._attention_derivative_cost(pairs=pairs, rows=rows, prefix_tokens=prefix_tokens, pages=pages)
        fixed = Cost(num_kernels=_KERNELS_A_CHUNK + _BACKWARD_KERNELS_A_CHUNK)
        return inputs + recomputed + derivative + attention + recurrence + backward.times(attending) + fixed

    def decode_cost(self, *, branches: int, steps: int, prefix_tokens: int, pages: int) -> Cost:
        """Return the cost of decoding ``steps`` tokens of each branch one by one, with a choice from the head each.

        A step reads all weights, every prefix page once for all branches, and each branch's own tokens so far.
        """
        own_tokens = branches * steps * (steps + 1) / 2
        step = self._layers_cost(branches, whole=self.layers, state_only=0)
        attention = self._attention_cost(
            pairs=branches * prefix_tokens + own_tokens / steps,
            rows=branches,
            prefix_tokens=prefix_tokens,
            pages=pages,
            layers=self.attention_layers,
        )
        own = Cost(moved_bytes=2.0 * own_tokens / steps * self.key_dim * self.attention_layers * self.item_bytes)
        choice = self.head_cost(rows=branches, backward=False)
        more = self.attention_layers * (_DECODE_KERNELS_A_LAYER + _DECODE_KERNELS_A_PAGE * pages)
        fixed = Cost(num_kernels=_KERNELS_A_CHUNK + _KERNELS_A_CHOICE + more)
        return (step + attention + own + self._decoded_recurrence_cost(branches) + choice + fixed).times(steps)

    def _decoded_recurrence_cost(self, branches: int) -> Cost:
        """Return what the rule costs in all recurrent layers for one more token of each branch."""
        if self.boundary is None:
            return Cost()
        heads, keys, values = self.boundary.recurrent_shape
        matrices = float(branches * heads * keys * values)
        one = Cost(
            flops=6.0 * matrices,
            moved_bytes=_DECODE_MATRIX_PASSES * matrices * self.wide_bytes,
            num_kernels=_DECODE_RECURRENT_KERNELS,
        )
        return one.times(self.recurrent_layers)

    def head_cost(self, *, rows: int, backward: bool, block_rows: int | None = None) -> Cost:
        """Return the cost of scoring rows, or of pulling their derivatives back, in blocks of ``block_rows``."""
        if not rows:
            return Cost()
        blocks = -(-rows // (block_rows or rows))
        logits = float(rows * self.vocab * self.wide_bytes)
        weights = blocks * self.vocab * self.hidden
        products = 3 if backward else 1
        gradient_bytes = weights * 2 * self.wide_bytes if backward else 0
        return Cost(
            flops=2.0 * products * rows * self.vocab * self.hidden,
            moved_bytes=logits * (_SCORE_BACKWARD_PASSES if backward else _SCORE_PASSES) + gradient_bytes,
            weight_bytes=float(weights * self.item_bytes * (2 if backward else 1)),
            num_kernels=float(blocks * _KERNELS_A_HEAD_BLOCK),
        )


def geometry(config: PreTrainedConfig, *, layer_parameters: int, dtype: torch.dtype) -> Geometry:
    """Return the geometry of a decoder."""
    heads, recurrent = int(config.num_attention_heads), recurrent_layers(config)
    return Geometry(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        layer_parameters=layer_parameters,
        item_bytes=dtype.itemsize,
        recurrent_layers=len(recurrent),
        last_is_recurrent=int(config.num_hidden_layers) - 1 in recurrent,
        boundary=boundary_layout(config, dtype) if recurrent else None,
    )


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Sizes of state: keys and values of every layer with attention, ``page_tokens`` tokens to a page.

    ``dtype`` is the compute dtype, ``cotangent_dtype`` the accumulation dtype, by name. ``boundary`` is the layout of
    the recurrent layers' boundaries, None where there are no such layers.
    """

    layers: int
    heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    cotangent_dtype: str
    boundary: BoundaryLayout | None = None


def state_layout(sizes: Geometry, *, dtype: torch.dtype, page_tokens: int) -> StateLayout:
    """Return the layout of a decoder's state."""
    return StateLayout(
        boundary=sizes.boundary,
        layers=sizes.attention_layers,
        heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        page_tokens=page_tokens,
        dtype=dtype_name(dtype),
        cotangent_dtype=dtype_name(accumulation_dtype(dtype)),
    )
