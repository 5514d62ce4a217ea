"""Forward and backward of one chunk, written once for every kind of chunk.

A chunk is a run of tokens of one node of the token tree (or one chunk each of several sibling leaves, batched). What
distinguishes a prompt chunk from a response chunk is only what is asked of it: state for later tokens, hidden rows
for the head, or both. The backward recomputes the chunk layer by layer from the layers' inputs, so that one layer's
activations are alive at a time; it is called for the chunks of a node from last to first, when the cotangents of the
chunk's state are complete. The inputs are what the forward kept of them (`LayerInputs`), or come from a forward of the
backward's own.

A chunk may go through the model in parts (``layers``), each a call of its own: then the hidden state comes in as
``entry_BSC`` and goes out, and so does its cotangent.

Invariant: both give the same bits, since the forward of a chunk and its recomputation do the same.

Shapes: B branches, S tokens, C hidden size, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from models.attention import AttentionResults, Prefix
from models.dense import Positions

KeepState = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Takes a layer's index and its new keys and values ``[B, K, S, D]``."""
StateCotangent = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns the gradients of a layer's new keys and values, ``[B, K, S, D]`` in the compute dtype."""
HeadBackward = Callable[[torch.Tensor], torch.Tensor]
"""Takes the last layer's output ``[B, S, C]`` and returns its gradient."""


class LayerInputs(Protocol):
    """What a chunk's forward keeps for its backward: every layer's input but the first, and the last one's output.

    ``layer`` counts from 1; the input of a layer behind the last is the last one's output. The first layer's input is
    the embedding, which is looked up again.
    """

    @property
    def results(self) -> AttentionResults | None:
        """Where what attention gives is kept too; None where it is computed again."""

    def keep(self, layer: int, hidden_BSC: torch.Tensor) -> None:
        """Keep a layer's input."""

    def recall(self, layer: int) -> torch.Tensor:
        """Return a layer's input, good until the next call; called once a layer, from last to first."""


class _Recomputed:
    """Layer inputs that a backward makes itself; each is let go as it is recalled."""

    results = None

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []

    def keep(self, layer: int, hidden_BSC: torch.Tensor) -> None:
        self._inputs.append(hidden_BSC)

    def recall(self, layer: int) -> torch.Tensor:
        return self._inputs.pop()


class Model(Protocol):
    """The phases of `models.dense.DenseModel`, real or traced."""

    num_layers: int

    def embed(self, ids_BS: torch.Tensor) -> torch.Tensor: ...
    def positions(self, hidden_BSC: torch.Tensor, first: int) -> Positions: ...
    def block_forward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        positions: Positions,
        prefix: Prefix,
        results: AttentionResults | None = None,
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
        results: AttentionResults | None = None,
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
    ids_BS: torch.Tensor | None,
    *,
    first_position: int,
    prefix: Prefix,
    keep_state: KeepState | None,
    want_hidden: bool,
    inputs: LayerInputs | None = None,
    layers: range | None = None,
    entry_BSC: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Evaluate a chunk without autograd; return the last layer's output ``[B, S, C]`` if it is wanted.

    With ``want_hidden`` false the last layer stops at its keys and values. ``inputs`` keep what the chunk's backward
    would compute again. ``layers`` are all unless given; their input is ``entry_BSC``, or the embedding of ``ids_BS``.
    """
    layers = range(model.num_layers) if layers is None else layers
    hidden = _entry(model, ids_BS, entry_BSC)
    positions = model.positions(hidden, first_position)
    results = None if inputs is None else inputs.results
    for layer in layers:
        if layer > layers.start and inputs is not None:
            inputs.keep(layer, hidden)
        if layer == layers[-1] and not want_hidden:
            key, value = model.block_state(layer, hidden, positions)
        else:
            hidden, key, value = model.block_forward(layer, hidden, positions, prefix, results)
        if keep_state is not None:
            keep_state(layer, key, value)
        del key, value
    if not want_hidden:
        return None
    if inputs is not None and layers.stop == model.num_layers:
        inputs.keep(model.num_layers, hidden)
    return hidden


def _entry(model: Model, ids_BS: torch.Tensor | None, entry_BSC: torch.Tensor | None) -> torch.Tensor:
    if entry_BSC is not None:
        return entry_BSC
    if ids_BS is None:
        raise ValueError("a chunk needs ids or an input of its first layer")
    return model.embed(ids_BS)


def backward_chunk(
    model: Model,
    ids_BS: torch.Tensor | None,
    *,
    first_position: int,
    prefix: Prefix,
    state_cotangent: StateCotangent | None,
    head_backward: HeadBackward | None,
    inputs: LayerInputs | None = None,
    layers: range | None = None,
    entry_BSC: torch.Tensor | None = None,
    d_out_BSC: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Differentiate a chunk: parameters' gradients to their accumulators, the prefix's cotangents to their pages.

    At least one of ``state_cotangent`` (later tokens saw this chunk's state) and ``head_backward`` (this chunk has
    scored rows) is given, or the output's cotangent ``d_out_BSC`` where layers follow. ``inputs`` are those that the
    chunk's forward kept; without them there is one more forward. ``layers`` and ``entry_BSC`` are as in
    `forward_chunk`; the entry's cotangent is returned where it is not the embedding.
    """
    layers = range(model.num_layers) if layers is None else layers
    hidden = _entry(model, ids_BS, entry_BSC)
    positions = model.positions(hidden, first_position)
    if inputs is None:
        own = layers if head_backward is not None else layers[:-1]
        inputs = _recompute(model, hidden, positions, prefix, own)
    d_hidden = d_out_BSC if head_backward is None else head_backward(inputs.recall(model.num_layers))
    for layer in reversed(layers):
        d_state = None if state_cotangent is None else state_cotangent(layer)
        entry = inputs.recall(layer) if layer > layers.start else hidden
        d_hidden = model.block_backward(layer, entry, positions, prefix, d_hidden, d_state, inputs.results)
        del d_state, entry
    if ids_BS is None or d_hidden is None:
        return d_hidden
    model.embed_backward(ids_BS, d_hidden)
    return None


def _recompute(
    model: Model, hidden_BSC: torch.Tensor, positions: Positions, prefix: Prefix, layers: range
) -> LayerInputs:
    """Return the outputs of ``layers``, each the input of the layer behind it."""
    inputs = _Recomputed()
    for layer in layers:
        hidden_BSC, key, value = model.block_forward(layer, hidden_BSC, positions, prefix)
        del key, value
        inputs.keep(layer + 1, hidden_BSC)
    return inputs
