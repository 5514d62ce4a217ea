"""Forward and backward of one chunk, written once for every kind of chunk.

A chunk is a run of tokens of one node of the token tree (or one chunk each of several sibling leaves, batched). What
distinguishes a prompt chunk from a response chunk is only what is asked of it: state for later tokens, hidden rows
for the head, or both. The backward recomputes the chunk layer by layer from stored layer inputs, so that one layer's
activations are alive at a time; it is called for the chunks of a node from last to first, when the cotangents of the
chunk's state are complete.

Shapes: B branches, S tokens, C hidden size, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from models.attention import Prefix
from models.dense import Positions

KeepState = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Takes a layer's index and its new keys and values ``[B, K, S, D]``."""
StateCotangent = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns the gradients of a layer's new keys and values, ``[B, K, S, D]`` in the compute dtype."""
HeadBackward = Callable[[torch.Tensor], torch.Tensor]
"""Takes the last layer's output ``[B, S, C]`` and returns its gradient."""


class Model(Protocol):
    """The phases of `models.dense.DenseModel`, real or traced."""

    num_layers: int

    def embed(self, ids_BS: torch.Tensor) -> torch.Tensor: ...
    def positions(self, hidden_BSC: torch.Tensor, first: int) -> Positions: ...
    def block_forward(
        self, layer: int, hidden_BSC: torch.Tensor, positions: Positions, prefix: Prefix
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def block_state(
        self, layer: int, hidden_BSC: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def block_backward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        positions: Positions,
        prefix: Prefix,
        d_out_BSC: torch.Tensor | None,
        d_state: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor: ...
    def head_score(
        self, hidden_RC: torch.Tensor, targets_R: torch.Tensor, *, temperature: float, block_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def head_backward(
        self,
        hidden_RC: torch.Tensor,
        targets_R: torch.Tensor,
        d_logps_R: torch.Tensor,
        d_entropies_R: torch.Tensor | None,
        *,
        temperature: float,
        block_rows: int,
    ) -> torch.Tensor: ...
    def embed_backward(self, ids_BS: torch.Tensor, d_hidden_BSC: torch.Tensor) -> None: ...


def forward_chunk(
    model: Model,
    ids_BS: torch.Tensor,
    *,
    first_position: int,
    prefix: Prefix,
    keep_state: KeepState | None,
    want_hidden: bool,
) -> torch.Tensor | None:
    """Evaluate a chunk without autograd; return the last layer's output ``[B, S, C]`` if it is wanted.

    With ``want_hidden`` false the last layer stops at its keys and values.
    """
    hidden = model.embed(ids_BS)
    positions = model.positions(hidden, first_position)
    for layer in range(model.num_layers):
        if layer == model.num_layers - 1 and not want_hidden:
            key, value = model.block_state(layer, hidden, positions)
        else:
            hidden, key, value = model.block_forward(layer, hidden, positions, prefix)
        if keep_state is not None:
            keep_state(layer, key, value)
        del key, value
    return hidden if want_hidden else None


def backward_chunk(
    model: Model,
    ids_BS: torch.Tensor,
    *,
    first_position: int,
    prefix: Prefix,
    state_cotangent: StateCotangent | None,
    head_backward: HeadBackward | None,
) -> None:
    """Differentiate a chunk: parameters' gradients to their accumulators, the prefix's cotangents to their pages.

    At least one of ``state_cotangent`` (later tokens saw this chunk's state) and ``head_backward`` (this chunk has
    scored rows) is given.
    """
    inputs, positions = _layer_inputs(model, ids_BS, first_position, prefix, through_last=head_backward is not None)
    d_hidden = None if head_backward is None else head_backward(inputs.pop())
    for layer in reversed(range(model.num_layers)):
        d_state = None if state_cotangent is None else state_cotangent(layer)
        d_hidden = model.block_backward(layer, inputs.pop(), positions, prefix, d_hidden, d_state)
        del d_state
    if d_hidden is not None:
        model.embed_backward(ids_BS, d_hidden)


def _layer_inputs(
    model: Model, ids_BS: torch.Tensor, first_position: int, prefix: Prefix, *, through_last: bool
) -> tuple[list[torch.Tensor], Positions]:
    """Return every layer's input, and the last layer's output too where it is asked for."""
    hidden = model.embed(ids_BS)
    positions = model.positions(hidden, first_position)
    inputs = [hidden]
    for layer in range(model.num_layers if through_last else model.num_layers - 1):
        hidden, key, value = model.block_forward(layer, hidden, positions, prefix)
        del key, value
        inputs.append(hidden)
    return inputs, positions
