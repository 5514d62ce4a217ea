"""Decoding a batch of branches token by token behind a shared prefix.

Every branch has one prefix, in pages that nobody copies, and a *tail*: the keys and values of its own tokens so far,
in memory that is there from the start for as many tokens as a branch can get, and in recurrent layers boundaries of its
own (`models.gated_delta`), at first the prefix's. A step writes one token's state into the tail in place and attends to
the tail as it lies, so a step needs the same bytes at any length.

Invariant: the branches that are still decoded are the first rows of the tail. One that is done leaves, and the last
row takes its place, so that arithmetic shrinks with the batch. Rows are therefore no identity: who needs to know
which branch a row is keeps count (see `stages.sampling`).

Shapes: B branches, C hidden size, K key/value heads, T tokens so far, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from models.attention import OwnState, Prefix
from models.dense import Positions
from models.gated_delta import Boundary, BoundaryLayout


class Decoder(Protocol):
    """The phases of `models.dense.DenseModel` that decoding needs, real or traced."""

    num_layers: int

    def is_recurrent(self, layer: int) -> bool: ...
    def embed(self, ids_BS: torch.Tensor) -> torch.Tensor: ...
    def positions(self, hidden_BSC: torch.Tensor, first: int) -> Positions: ...
    def block_decode(
        self, layer: int, hidden_B1C: torch.Tensor, positions: Positions, prefix: Prefix, own: OwnState
    ) -> torch.Tensor: ...
    def recurrent_decode(
        self, layer: int, hidden_B1C: torch.Tensor, before: Boundary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class Tail:
    """Keys and values of the tokens that each of ``branches`` branches has decoded; room for ``tokens`` of them.

    ``rows`` numbers the layers that keep such. Recurrent ones `begin` at a boundary.
    """

    def __init__(
        self,
        *,
        rows: Mapping[int, int],
        branches: int,
        heads: int,
        tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, branches, heads, tokens, head_dim)
        self._state = {layer: torch.empty(shape, dtype=dtype, device=device) for layer in rows}
        self._boundaries: dict[int, Boundary] = {}
        self._device = device
        self.branches, self.length = branches, 0

    def begin(self, layer: int, before: Boundary | None, layout: BoundaryLayout) -> None:
        """Let all branches begin at a boundary, which is copied; None for the start of a sequence."""
        own = self._boundaries[layer] = layout.zeros(self.branches, self._device)
        if before is not None:
            for mine, shared in zip(own, before, strict=True):
                mine.copy_(shared.expand_as(mine))

    def boundary(self, layer: int) -> Boundary:
        """Return the boundaries of the branches that are still decoded in a recurrent layer."""
        conv, recurrent = self._boundaries[layer]
        return Boundary(conv[: self.branches], recurrent[: self.branches])

    def put(self, layer: int, conv_BEX: torch.Tensor, recurrent_BHKV: torch.Tensor) -> None:
        """Replace a recurrent layer's boundaries."""
        for mine, new in zip(self.boundary(layer), (conv_BEX, recurrent_BHKV), strict=True):
            mine.copy_(new)

    def append(self, layer: int, key_BK1D: torch.Tensor, value_BK1D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `models.attention.OwnState`. The token counts once all layers have it and `advance` was called."""
        state = self._state[layer][:, : self.branches, :, : self.length + 1]
        state[0, :, :, self.length :].copy_(key_BK1D)
        state[1, :, :, self.length :].copy_(value_BK1D)
        return state[0], state[1]

    def advance(self) -> None:
        """Count the token that every layer has appended."""
        self.length += 1

    def leave(self, row: int) -> None:
        """Let the branch in ``row`` go; the last one takes its row."""
        last = self.branches - 1
        if row != last:
            for state in self._state.values():
                state[:, row, :, : self.length].copy_(state[:, last, :, : self.length])
            for part in (part for boundary in self._boundaries.values() for part in boundary):
                part[row].copy_(part[last])
        self.branches = last


def decode_step(model: Decoder, ids_B1: torch.Tensor, *, position: int, prefix: Prefix, tail: Tail) -> torch.Tensor:
    """Evaluate one more token of every branch, all at ``position``; return the last layer's output ``[B, C]``."""
    hidden = model.embed(ids_B1)
    positions = model.positions(hidden, position)
    for layer in range(model.num_layers):
        if model.is_recurrent(layer):
            hidden, conv, recurrent = model.recurrent_decode(layer, hidden, tail.boundary(layer))
            tail.put(layer, conv, recurrent)
        else:
            hidden = model.block_decode(layer, hidden, positions, prefix, tail)
    tail.advance()
    return hidden[:, 0]
