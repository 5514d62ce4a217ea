"""Where a node's state lives in a plan, and how a chunk's evaluation reaches it.

A *column* is one page of every layer for the same tokens of one node: one Value for the keys and values, one for
their cotangents, each ``[layers, 2, K, T, D]`` (K key/value heads, T tokens, D head dimension). Pages are a constant
of the plan: they neither follow chunks nor cross nodes. Cotangents are in the accumulation dtype.

`PagedPrefix` is what attention sees: the columns of a chunk's ancestors and of its own node, up to its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.context import StageContext
from engine.plan import TensorSpec, Value, ValueKind
from models.geometry import StateLayout


@dataclass(frozen=True, kw_only=True)
class Column:
    """Tokens ``first`` to ``first + tokens`` of a node, in all layers. ``cotangent`` is None where none is kept."""

    state: str
    cotangent: str | None
    first: int
    tokens: int

    def overlap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the part of tokens ``start`` to ``stop`` that lies here, counted from the column's first token."""
        low, high = max(start, self.first), min(stop, self.first + self.tokens)
        return (low - self.first, high - self.first) if low < high else None


def make_columns(node: str, tokens: int, layout: StateLayout, *, with_cotangents: bool) -> tuple[Column, ...]:
    """Cut a node's tokens into columns; names are ``NODE/state/N`` and ``NODE/cotangent/N``."""
    return tuple(
        Column(
            state=f"{node}/state/{number}",
            cotangent=f"{node}/cotangent/{number}" if with_cotangents else None,
            first=first,
            tokens=min(layout.page_tokens, tokens - first),
        )
        for number, first in enumerate(range(0, tokens, layout.page_tokens))
    )


def column_values(column: Column, layout: StateLayout) -> list[Value]:
    """Return the Values of a column."""
    shape = (layout.layers, 2, layout.heads, column.tokens, layout.head_dim)
    named = [(column.state, layout.dtype), (column.cotangent, layout.cotangent_dtype)]
    return [
        Value(name=name, tensors={"kv": TensorSpec(shape=shape, dtype=dtype)}, kind=ValueKind.ORDERED)
        for name, dtype in named
        if name is not None
    ]


class PagedPrefix:
    """The columns that a chunk attends to, oldest first, with the number of tokens visible in each."""

    def __init__(self, context: StageContext, columns: Sequence[tuple[Column, int]]) -> None:
        self._context = context
        self._columns = columns
        self.token_counts = tuple(tokens for _, tokens in columns)

    def page(self, layer: int, index: int) -> torch.Tensor:
        """Return keys and values ``[2, K, T, D]`` of the visible tokens of a page."""
        column, tokens = self._columns[index]
        return self._context.piece(column.state, layer)[:, :, :tokens]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        """Add ``[1, K, T, D]`` each to the page's cotangent, if it has one."""
        column, _ = self._columns[index]
        if column.cotangent is not None:
            self._context.add_rows(column.cotangent, layer, 0, (d_key[0], d_value[0]))


def write_state(
    context: StageContext,
    columns: Sequence[Column],
    layer: int,
    start: int,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
) -> None:
    """Write the new keys and values of tokens from ``start`` on to the columns they lie in."""
    stop = start + key_1KSD.shape[2]
    for column in columns:
        if (part := column.overlap(start, stop)) is not None:
            source = slice(column.first + part[0] - start, column.first + part[1] - start)
            context.write_rows(column.state, layer, part[0], (key_1KSD[0, :, source], value_1KSD[0, :, source]))


def read_cotangent(
    context: StageContext, columns: Sequence[Column], layer: int, start: int, stop: int, layout: StateLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cotangents of keys and values of tokens ``start`` to ``stop``, ``[1, K, S, D]``, compute dtype."""
    shape = (1, layout.heads, stop - start, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    d_key, d_value = (torch.empty(shape, dtype=dtype, device=context.device) for _ in range(2))
    for column in columns:
        part = column.overlap(start, stop)
        if part is None:
            continue
        if column.cotangent is None:
            raise ValueError(f"{column.state} has no cotangent to read")
        piece = context.piece(column.cotangent, layer)[:, :, part[0] : part[1]]
        target = slice(column.first + part[0] - start, column.first + part[1] - start)
        d_key[0, :, target].copy_(piece[0])
        d_value[0, :, target].copy_(piece[1])
    return d_key, d_value
