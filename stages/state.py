"""Where a node's state lives in a plan, and how a chunk's evaluation reaches it.

A *page* holds the keys and values of the same tokens of one node in one layer, ``[2, K, T, D]`` (K key/value heads, T
tokens, D head dimension); it is what attention meets and what streams move. Pages are a constant of the plan: they
neither follow chunks nor cross nodes. A *column* is a run of pages in every layer that has some: one Value for the keys
and values, one for their cotangents, each ``[layers * pages, 2, K, T, D]``, layer by layer. Cotangents are in the
accumulation dtype. A long node has no more than `MOST_COLUMNS` columns, so that a plan's size does not grow with the
square of a prompt's length. What recurrent layers keep is in `stages.boundary`.

`PagedPrefix` is what attention sees: the pages of a chunk's ancestors and of its own node, up to its first token.
What a chunk's forward keeps for its backward is in `stages.kept`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.plan import ALL_TIERS, TensorSpec, Value, ValueKind
from engine.streams import Place
from models.geometry import StateLayout

MOST_COLUMNS = 256
# Every stage names the columns that it sees, half of them on average, and the scheduler decides over each. State can be
# placed and freed in steps of less than half a percent of a node, and a plan of 500 chunks has 65,000 uses of columns.


@dataclass(frozen=True, kw_only=True)
class Column:
    """``pages`` pages of ``page_tokens`` tokens of a node, from token ``first`` on, in all layers.

    ``cotangent`` is None where none is kept.
    """

    state: str
    cotangent: str | None
    first: int
    page_tokens: int
    pages: int = 1

    @property
    def tokens(self) -> int:
        return self.page_tokens * self.pages

    def overlap(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the part of tokens ``start`` to ``stop`` that lies here, counted from the column's first token."""
        low, high = max(start, self.first), min(stop, self.first + self.tokens)
        return (low - self.first, high - self.first) if low < high else None

    def pages_of(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (page, low, high, offset) of tokens ``start`` to ``stop``: tokens ``low`` to ``high`` of a page.

        ``offset`` is where they begin, counted from ``start``.
        """
        part = self.overlap(start, stop)
        if part is None:
            return
        for page in range(part[0] // self.page_tokens, -(-part[1] // self.page_tokens)):
            base = page * self.page_tokens
            low, high = max(part[0] - base, 0), min(part[1] - base, self.page_tokens)
            yield page, low, high, self.first + base + low - start


Visible = tuple[tuple[Column, int], ...]
"""Columns, oldest first, with the number of tokens visible in each."""


def make_columns(node: str, tokens: int, layout: StateLayout, *, with_cotangents: bool) -> tuple[Column, ...]:
    """Cut a node's tokens into columns; names are ``NODE/state/N`` and ``NODE/cotangent/N``.

    What is left behind the last whole page is a column of one shorter page.
    """
    pages, rest = divmod(tokens, layout.page_tokens)
    together = max(1, -(-pages // MOST_COLUMNS))
    shapes = [(layout.page_tokens, min(together, pages - first)) for first in range(0, pages, together)]
    shapes += [(rest, 1)] if rest else []
    return tuple(
        Column(
            state=f"{node}/state/{number}",
            cotangent=f"{node}/cotangent/{number}" if with_cotangents else None,
            first=number * together * layout.page_tokens if page_tokens == layout.page_tokens else tokens - rest,
            page_tokens=page_tokens,
            pages=count,
        )
        for number, (page_tokens, count) in enumerate(shapes)
    )


def column_values(column: Column, layout: StateLayout, tiers: tuple[Tier, ...] = ALL_TIERS) -> list[Value]:
    """Return the Values of a column, which may live on ``tiers``."""
    shape = (layout.layers * column.pages, 2, layout.heads, column.page_tokens, layout.head_dim)
    named = [(column.state, layout.dtype), (column.cotangent, layout.cotangent_dtype)]
    return [
        Value(name=name, tensors={"kv": TensorSpec(shape=shape, dtype=dtype)}, kind=ValueKind.ORDERED, tiers=tiers)
        for name, dtype in named
        if name is not None
    ]


def whole(columns: Sequence[Column]) -> Visible:
    """Return columns with all of their tokens visible."""
    return tuple((column, column.tokens) for column in columns)


def before(node: Visible, stop: int) -> Visible:
    """Return what of a whole node's columns lies before its token ``stop``."""
    end = bisect_left(node, stop, key=_first)
    if not end:
        return ()
    column, tokens = node[end - 1]
    return (*node[: end - 1], (column, min(tokens, stop - column.first)))


def between(node: Visible, start: int, stop: int) -> tuple[Column, ...]:
    """Return those of a whole node's columns that tokens ``start`` to ``stop`` lie in."""
    low = max(0, bisect_right(node, start, key=_first) - 1)
    found = (column for column, _ in node[low : bisect_left(node, stop, key=_first)])
    return tuple(column for column in found if column.overlap(start, stop) is not None)


def _first(item: tuple[Column, int]) -> int:
    return item[0].first


def num_pages(visible: Visible) -> int:
    """Return the number of pages of which tokens are visible."""
    return sum(-(-tokens // column.page_tokens) for column, tokens in visible)


def page_runs(visible: Visible) -> list[list[int]]:
    """Return what is visible as plain data: [tokens of a page, tokens] of every run of whole pages and a last part."""
    runs: list[list[int]] = []
    for column, tokens in visible:
        if runs and runs[-1][0] == column.page_tokens and runs[-1][1] % column.page_tokens == 0:
            runs[-1][1] += tokens
        else:
            runs.append([column.page_tokens, tokens])
    return runs


class PagedPrefix:
    """The pages that a chunk attends to, oldest first, with the number of tokens visible in each.

    ``rows`` says which of the columns' layers a layer of the model is.
    """

    def __init__(self, context: StageContext, visible: Visible, rows: Mapping[int, int]) -> None:
        self._context, self._rows = context, rows
        self._pages = [
            (column, page, high)
            for column, tokens in visible
            for page, _, high, _ in column.pages_of(column.first, column.first + tokens)
        ]
        self._states = [column.state for column, _, _ in self._pages]
        self._cotangents = [column.cotangent for column, _, _ in self._pages]
        self.token_counts = tuple(tokens for _, _, tokens in self._pages)

    def page(self, layer: int, index: int) -> torch.Tensor:
        """Return keys and values ``[2, K, T, D]`` of the visible tokens of a page."""
        column, page, tokens = self._pages[index]
        then = self._next(layer, index, self._states)
        return self._context.piece(column.state, self._piece(layer, column, page), then)[:, :, :tokens]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        """Add ``[1, K, T, D]`` each to the page's cotangent, if it has one."""
        column, page, _ = self._pages[index]
        if column.cotangent is not None:
            then = self._next(layer, index, self._cotangents)
            piece = self._piece(layer, column, page)
            self._context.add_rows(column.cotangent, piece, 0, (d_key[0], d_value[0]), then)

    def _next(self, layer: int, index: int, names: Sequence[str | None]) -> Place | None:
        """Return where the next page of a layer lies: attention goes through them in this order, layer by layer."""
        if index + 1 == len(self._pages):
            return None
        column, page, _ = self._pages[index + 1]
        name = names[index + 1]
        return None if name is None else (name, self._piece(layer, column, page))

    def _piece(self, layer: int, column: Column, page: int) -> int:
        return self._rows[layer] * column.pages + page


def write_state(
    context: StageContext,
    columns: Sequence[Column],
    layer: int,
    start: int,
    key_1KSD: torch.Tensor,
    value_1KSD: torch.Tensor,
) -> None:
    """Write the new keys and values of tokens from ``start`` on to the pages they lie in.

    ``layer`` counts from the columns' first.
    """
    stop = start + key_1KSD.shape[2]
    for column in columns:
        for page, low, high, offset in column.pages_of(start, stop):
            source = slice(offset, offset + high - low)
            parts = (key_1KSD[0, :, source], value_1KSD[0, :, source])
            context.write_rows(column.state, layer * column.pages + page, low, parts)


def read_cotangent(
    context: StageContext, columns: Sequence[Column], layer: int, start: int, stop: int, layout: StateLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cotangents of keys and values of tokens ``start`` to ``stop``, ``[1, K, S, D]``, compute dtype.

    ``layer`` counts from the columns' first.
    """
    shape = (1, layout.heads, stop - start, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    d_key, d_value = (torch.empty(shape, dtype=dtype, device=context.device) for _ in range(2))
    for column in columns:
        for page, low, high, offset in column.pages_of(start, stop):
            if column.cotangent is None:
                raise ValueError(f"{column.state} has no cotangent to read")
            piece = context.piece(column.cotangent, layer * column.pages + page)[:, :, low:high]
            target = slice(offset, offset + high - low)
            d_key[0, :, target].copy_(piece[0])
            d_value[0, :, target].copy_(piece[1])
    return d_key, d_value
