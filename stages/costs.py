"""What the chunks of a step cost: one chunk in one layer span, or all of them together without making their stages.

A cost is linear in the tokens and pages that a chunk sees, so the chunks of one length of a node cost together as many
times what one costs that sees as much as they do on average.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.plan import Cost
from models.geometry import Geometry
from stages.operators import backward_operators, forward_operators
from stages.spans import Span
from stages.tree import Chunk, Node, chunks_of, waves_of


@dataclass(frozen=True, kw_only=True)
class ChunkCosts:
    """The costs of chunks of a model of ``sizes``, whose rows meet the head ``head_rows`` at a time.

    ``stored_inputs`` says what a chunk's forward keeps for its backward (`stages.kept`). State lies in pages of
    ``page_tokens`` tokens; that of scored chunks, which is mostly not kept, is left out.
    """

    sizes: Geometry
    head_rows: int
    stored_inputs: int
    page_tokens: int

    @cached_property
    def _sizes_by_layers(self) -> dict[tuple[int, int], Geometry]:
        return {}

    def _sizes_of(self, span: Span) -> Geometry:
        """Return the sizes of a span's layers, which have about as many parameters each."""
        layers, recurrent = len(span.layers), len(span.recurrent)
        if (layers, recurrent) not in self._sizes_by_layers:
            share = self.sizes.layer_parameters * layers // span.num_layers
            sizes = replace(self.sizes, layers=layers, recurrent_layers=recurrent, layer_parameters=share)
            self._sizes_by_layers[layers, recurrent] = sizes
        return self._sizes_by_layers[layers, recurrent]

    def forward(self, chunk: Chunk, span: Span, *, prefix_tokens: float, pages: float) -> Cost:
        """Return the cost of a chunk's forward through a span, behind a prefix in so many pages."""
        own_pages = self._own_pages(chunk)
        beside = forward_operators(chunk, span, pages=pages, own_pages=own_pages, kept=self.stored_inputs)
        layers = self._sizes_of(span).forward_cost(**_seen(chunk, span, prefix_tokens, pages))
        return beside + self._head(chunk, span, backward=False) + layers

    def backward(self, chunk: Chunk, span: Span, *, prefix_tokens: float, pages: float) -> Cost:
        """Return the cost of a chunk's backward; it is cheaper where the forward kept something."""
        own_pages = self._own_pages(chunk)
        beside = backward_operators(chunk, span, pages=pages, own_pages=own_pages, kept=self.stored_inputs)
        layers = self._sizes_of(span).backward_cost(
            **_seen(chunk, span, prefix_tokens, pages),
            again=0 if self.stored_inputs else len(span.layers) - (not self._scored(chunk, span)),
            recalls_attention=self.stored_inputs > 1,
        )
        return beside + self._head(chunk, span, backward=True) + layers

    def _head(self, chunk: Chunk, span: Span, *, backward: bool) -> Cost:
        return self._sizes_of(span).head_cost(
            rows=self._scored(chunk, span), backward=backward, block_rows=self.head_rows
        )

    @staticmethod
    def _scored(chunk: Chunk, span: Span) -> int:
        """Return how many of a chunk's rows meet the head behind a span."""
        return chunk.max_rows if span.is_last else 0

    def _own_pages(self, chunk: Chunk) -> int:
        return 0 if chunk.max_rows else -(-chunk.max_tokens // self.page_tokens)


def _seen(chunk: Chunk, span: Span, prefix_tokens: float, pages: float) -> dict[str, Any]:
    """Return what a span's layers see of a chunk; ``through_last`` says whether it goes through all of its last one."""
    return {
        "rows": len(chunk.nodes) * chunk.max_tokens,
        "tokens": chunk.max_tokens,
        "prefix_tokens": prefix_tokens,
        "pages": pages,
        "through_last": bool(chunk.max_rows) or not span.is_last,
    }


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of all chunks of a step's trees in given layer spans; ``exact`` says whether prompts are swept."""

    costs: ChunkCosts
    spans: Sequence[Span]
    chunk_tokens: int
    branches_at_once: int
    page_tokens: int
    exact: bool

    def total(self, trees: Sequence[Node]) -> tuple[Cost, int]:
        """Return the cost of all stages together, and their number."""
        found = [part for tree in trees for part in self._below((tree,), 0, swept=self.exact)]
        total = Cost()
        for cost, _ in found:
            total += cost
        return total, sum(number for _, number in found)

    def _below(self, nodes: tuple[Node, ...], pages: int, *, swept: bool) -> Iterator[tuple[Cost, int]]:
        chunks = chunks_of(nodes, self.chunk_tokens)
        alike: dict[tuple[int, int], list[Chunk]] = {}
        for chunk in chunks:
            alike.setdefault((chunk.max_tokens, chunk.max_rows), []).append(chunk)
        for found in alike.values():
            yield from self._of_alike(found, pages, swept=swept)
        behind = pages + -(-chunks[-1].stop // self.page_tokens) if chunks else pages
        for wave in waves_of(nodes[0].children, chunk_tokens=self.chunk_tokens, branches_at_once=self.branches_at_once):
            yield from self._below(wave, behind, swept=True)

    def _of_alike(self, chunks: Sequence[Chunk], pages: int, *, swept: bool) -> Iterator[tuple[Cost, int]]:
        """Yield the costs of chunks of one length behind ``pages`` pages of their ancestors' state."""
        chunk, number = chunks[0], len(chunks)
        prefix = {
            "prefix_tokens": sum(chunk.first_position for chunk in chunks) / number,
            "pages": pages + sum(-(-chunk.start // self.page_tokens) for chunk in chunks) / number,
        }
        for span, times in self._kinds:
            yield self.costs.forward(chunk, span, **prefix).times(number * times), number * times
            if swept or chunk.max_rows:
                yield self.costs.backward(chunk, span, **prefix).times(number * times), number * times

    @cached_property
    def _kinds(self) -> list[tuple[Span, int]]:
        """Spans that cost as much as others, once, with their numbers."""
        kinds: dict[Hashable, list[Span]] = {}
        for span in self.spans:
            kinds.setdefault((span.kinds, span.is_last), []).append(span)
        return [(found[0], len(found)) for found in kinds.values()]
