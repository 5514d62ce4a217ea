"""What a chunk's forward keeps so that its backward need not compute it again.

The choice ``stored_inputs`` says how much: 0 nothing, and the backward does a forward of its own for the layers'
inputs; 1 the inputs, and each layer is recomputed once, from its input; 2 also what attention gave, and recomputing a
layer leaves attention out, which is most of the work behind a long prefix. More needs more bytes, on any tier, but no
more of the device than its buffers, and less workspace.

A chunk's `KeptInputs` are Values of its own, one layer to a piece, written in its forward and dropped after its
backward.

Invariant: what is kept changes no bit of the result.

Shapes: B branches, S tokens, C hidden size, H query heads, D head dimension. Where tokens are sampled, S is the most
there can be, and the first of them are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.plan import ALL_TIERS, Stream, TensorSpec, Value, ValueKind
from models.geometry import Geometry, StateLayout
from stages.spans import Span
from stages.tree import Chunk

STORED_INPUTS_LADDER = (2, 1, 0)
# From the least arithmetic to the fewest bytes.


@dataclass(frozen=True, kw_only=True)
class KeptInputs:
    """The Values that a chunk keeps.

    ``inputs`` has the inputs of the span's layers from the second on, and the model's output where the chunk has scored
    rows: ``[pieces, B, S, C]``. ``attention`` and ``logsumexp`` have what attention gave in the layers that run it,
    ``[pieces, B, S, H * D]`` and ``[pieces, B, S, H]``, the latter in the accumulation dtype. What is not kept is None.
    """

    span: Span
    inputs: Value | None = None
    attention: Value | None = None
    logsumexp: Value | None = None

    @property
    def values(self) -> tuple[Value, ...]:
        return tuple(value for value in (self.inputs, self.attention, self.logsumexp) if value is not None)

    def written(self) -> Stream:
        """Return the stream of the chunk's forward."""
        return Stream(values=tuple(value.name for value in self.values), updates=True, buffered=False)

    def read(self) -> tuple[Stream, ...]:
        """Return the streams of the chunk's backward: one piece of each Value is in use at a time."""
        return tuple(Stream(values=(value.name,)) for value in self.values)


def kept_inputs(
    name: str,
    chunk: Chunk,
    sizes: Geometry,
    layout: StateLayout,
    *,
    level: int,
    span: Span,
    tiers: tuple[Tier, ...] = ALL_TIERS,
) -> KeptInputs | None:
    """Return what the chunk ``name`` keeps of a span at a ``level`` of ``stored_inputs``; None where that is nothing.

    It may live on ``tiers``.
    """
    last_runs = bool(chunk.max_rows) or not span.is_last
    num_inputs = len(span.layers) - (not chunk.max_rows or not span.is_last)
    num_results = len([layer for layer in span.attention_rows if last_runs or layer != span.layers[-1]])
    num_results = num_results if level > 1 else 0
    if not level or not (num_inputs or num_results):
        return None

    def value(kind: str, num_pieces: int, width: int, dtype: str) -> Value | None:
        if not num_pieces:
            return None
        shape = (num_pieces, len(chunk.nodes), chunk.max_tokens, width)
        tensors = {kind: TensorSpec(shape=shape, dtype=dtype)}
        return Value(name=f"{name}/{kind}", tensors=tensors, kind=ValueKind.ORDERED, tiers=tiers)

    return KeptInputs(
        span=span,
        inputs=value("inputs", num_inputs, sizes.hidden, layout.dtype),
        attention=value("attention", num_results, sizes.heads * sizes.head_dim, layout.dtype),
        logsumexp=value("logsumexp", num_results, sizes.heads, layout.cotangent_dtype),
    )


class ChunkInputs:
    """Reads and writes a chunk's `KeptInputs`: `models.chunk.LayerInputs`."""

    def __init__(self, context: StageContext, kept: KeptInputs, *, num_tokens: int) -> None:
        self._context, self._num_tokens = context, num_tokens
        self._name = "" if kept.inputs is None else kept.inputs.name
        self._second_layer = kept.span.layers.start + 1
        self.results: ChunkResults | None = None
        if kept.attention is not None and kept.logsumexp is not None:
            names = kept.attention.name, kept.logsumexp.name
            self.results = ChunkResults(context, *names, num_tokens=num_tokens, rows=kept.span.attention_rows)

    def keep(self, layer: int, hidden_BSC: torch.Tensor) -> None:
        self._context.write_rows(self._name, layer - self._second_layer, 0, hidden_BSC.unbind())

    def recall(self, layer: int) -> torch.Tensor:
        return self._context.piece(self._name, layer - self._second_layer)[:, : self._num_tokens]


class ChunkResults:
    """Reads and writes what attention gave: `models.attention.AttentionResults`."""

    def __init__(self, context: StageContext, out: str, lse: str, *, num_tokens: int, rows: Mapping[int, int]) -> None:
        self._context, self._out, self._lse, self._num_tokens = context, out, lse, num_tokens
        self._rows = rows
        self._recalls = not any(stream.updates and out in stream.values for stream in context.stage.streams)

    def keep(self, layer: int, out_BHSD: torch.Tensor, lse_BHS: torch.Tensor) -> None:
        piece = self._rows[layer]
        self._context.write_rows(self._out, piece, 0, out_BHSD.transpose(1, 2).flatten(2).unbind())
        self._context.write_rows(self._lse, piece, 0, lse_BHS.transpose(1, 2).unbind())

    def recall(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._recalls:
            return None
        piece = self._rows[layer]
        out_BSE = self._context.piece(self._out, piece)[:, : self._num_tokens]
        lse_BSH = self._context.piece(self._lse, piece)[:, : self._num_tokens]
        return out_BSE.unflatten(2, (lse_BSH.shape[2], -1)).transpose(1, 2), lse_BSH.transpose(1, 2)
