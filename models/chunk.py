"""Forward and backward of one chunk, written once for every kind of chunk.

A chunk is a run of tokens of one node of the token tree (or one chunk each of several sibling leaves, batched). What
distinguishes a prompt chunk from a response chunk is only what is asked of it: state for later tokens, hidden rows
for the head, or both. The backward recomputes the chunk layer by layer from the layers' inputs, so that one layer's
activations are alive at a time; it is called for the chunks of a node from last to first, when the cotangents of the
chunk's state are complete. The inputs are what the forward kept of them (`LayerInputs`), or come from a forward of the
backward's own.

A layer keeps one of two kinds of state (`models.dense`): keys and values, which are added to those of the tokens before
and seen as a prefix of pages, or a boundary of fixed size, which takes the place of the one before (`Boundaries`).

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
from models.gated_delta import Boundary

KeepState = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Takes a layer's index and its new keys and values ``[B, K, S, D]``."""
StateCotangent = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Returns the gradients of a layer's new keys and values, ``[B, K, S, D]`` in the compute dtype."""
HeadBackward = Callable[[torch.Tensor], torch.Tensor]
"""Takes the last layer's output ``[B, S, C]`` and returns its gradient."""


class Boundaries(Protocol):
    """The boundaries of the recurrent layers before and behind a chunk, and the gradients with respect to them."""

    def before(self, layer: int) -> Boundary | None:
        """Return the boundary before the chunk, good until the next call; None at the start of a sequence."""

    def keep(self, layer: int, after: Boundary) -> None:
        """Keep the boundary behind the chunk, if later tokens need it."""

    def cotangent(self, layer: int) -> Boundary | None:
        """Return the gradient of the boundary behind the chunk; None where no later token sees it."""

    def add_cotangent(self, layer: int, d_before: Boundary) -> None:
        """Take the gradient of the boundary before the chunk; where others share that, it is added to theirs."""


class NoBoundaries:
    """The boundaries of a chunk that begins a sequence and whose state nobody needs."""

    def before(self, layer: int) -> Boundary | None:
        return None

    def keep(self, layer: int, after: Boundary) -> None: ...

    def cotangent(self, layer: int) -> Boundary | None:
        return None

    def add_cotangent(self, layer: int, d_before: Boundary) -> None: ...


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

    def is_recurrent(self, layer: int) -> bool: ...
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
    def recurrent_forward(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def recurrent_state(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def recurrent_backward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        before: Boundary | None,
        d_out_BSC: torch.Tensor | None,
        d_after: Boundary | None,
    ) -> tuple[torch.Tensor, ...]: ...
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
    boundaries: Boundaries | None = None,
    keep_state: KeepState | None,
    want_hidden: bool,
    inputs: LayerInputs | None = None,
    layers: range | None = None,
    entry_BSC: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Evaluate a chunk without autograd; return the last layer's output ``[B, S, C]`` if it is wanted.

    With ``want_hidden`` false the last layer stops at its state. ``inputs`` keep what the chunk's backward
    would compute again. ``layers`` are all unless given; their input is ``entry_BSC``, or the embedding of ``ids_BS``.
    """
    layers = range(model.num_layers) if layers is None else layers
    hidden = _entry(model, ids_BS, entry_BSC)
    positions = model.positions(hidden, first_position)
    results = None if inputs is None else inputs.results
    boundaries = NoBoundaries() if boundaries is None else boundaries
    for layer in layers:
        if layer > layers.start and inputs is not None:
            inputs.keep(layer, hidden)
        state_only = layer == layers[-1] and not want_hidden
        if model.is_recurrent(layer):
            hidden = _recurrent_forward(model, layer, hidden, boundaries, state_only=state_only)
            continue
        if state_only:
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


def _recurrent_forward(
    model: Model, layer: int, hidden_BSC: torch.Tensor, boundaries: Boundaries, *, state_only: bool
) -> torch.Tensor:
    """Evaluate a recurrent layer, keep its boundary, and return its output; with ``state_only`` its input."""
    before = boundaries.before(layer)
    if state_only:
        conv, recurrent = model.recurrent_state(layer, hidden_BSC, before)
    else:
        hidden_BSC, conv, recurrent = model.recurrent_forward(layer, hidden_BSC, before)
    boundaries.keep(layer, Boundary(conv, recurrent))
    return hidden_BSC


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
    boundaries: Boundaries | None = None,
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
    boundaries = NoBoundaries() if boundaries is None else boundaries
    if inputs is None:
        own = layers if head_backward is not None else layers[:-1]
        inputs = _recompute(model, hidden, positions, prefix, boundaries, own)
    d_hidden = d_out_BSC if head_backward is None else head_backward(inputs.recall(model.num_layers))
    for layer in reversed(layers):
        entry = inputs.recall(layer) if layer > layers.start else hidden
        if model.is_recurrent(layer):
            d_hidden = _recurrent_backward(model, layer, entry, boundaries, d_hidden)
            del entry
            continue
        d_state = None if state_cotangent is None else state_cotangent(layer)
        d_hidden = model.block_backward(layer, entry, positions, prefix, d_hidden, d_state, inputs.results)
        del d_state, entry
    if ids_BS is None or d_hidden is None:
        return d_hidden
    model.embed_backward(ids_BS, d_hidden)
    return None


def _recurrent_backward(
    model: Model, layer: int, hidden_BSC: torch.Tensor, boundaries: Boundaries, d_out_BSC: torch.Tensor | None
) -> torch.Tensor:
    """Differentiate a recurrent layer; return the cotangent of its input."""
    before = boundaries.before(layer)
    d_hidden, *d_before = model.recurrent_backward(layer, hidden_BSC, before, d_out_BSC, boundaries.cotangent(layer))
    if d_before:
        boundaries.add_cotangent(layer, Boundary(*d_before))
    return d_hidden


def _recompute(
    model: Model,
    hidden_BSC: torch.Tensor,
    positions: Positions,
    prefix: Prefix,
    boundaries: Boundaries,
    layers: range,
) -> LayerInputs:
    """Return the outputs of ``layers``, each the input of the layer behind it."""
    inputs = _Recomputed()
    for layer in layers:
        if model.is_recurrent(layer):
            hidden_BSC = model.recurrent_forward(layer, hidden_BSC, boundaries.before(layer))[0]
        else:
            hidden_BSC = model.block_forward(layer, hidden_BSC, positions, prefix)[0]
        inputs.keep(layer + 1, hidden_BSC)
    return inputs
