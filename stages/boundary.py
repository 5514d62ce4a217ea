"""Where the boundaries of recurrent layers live in a plan, and how a chunk's evaluation reaches them.

A chunk leaves a *boundary* behind in every recurrent layer (`models.gated_delta`): what later tokens need of it, of
fixed size. An `Edge` is the place between two chunks of a node, or behind its last one, with the boundaries of a span's
recurrent layers there, a layer to a piece: one Value for the convolutions' inputs, ``[layers, 1, E, k - 1]``, one for
the heads' matrices, ``[layers, 1, H * K, V]``, and one each for their cotangents, in the accumulation dtype.

The chunk behind an edge is the only one that begins there, so what it gives for the edge's cotangent is all there is;
but all branches of a prompt begin at its last edge, and their cotangents are added up, wave by wave. Several branches
that are evaluated together begin at one edge; none of them has an edge behind it, as only branches of one chunk are.

Shapes: E channels and k columns of the convolution, H value heads, K and V key and value dimension of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.plan import ALL_TIERS, Stream, TensorSpec, Value, ValueKind
from engine.tensors import dtype_name
from models.float64 import accumulation_dtype
from models.gated_delta import Boundary, BoundaryLayout


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Boundaries at one place of a node, in a span's recurrent layers; ``name`` begins its Values' names.

    ``is_shared`` says whether several waves of branches begin here.
    """

    name: str
    has_cotangent: bool
    is_shared: bool

    @property
    def states(self) -> tuple[str, str]:
        """The Values of the convolutions' inputs and of the matrices."""
        return f"{self.name}/conv", f"{self.name}/recurrent"

    @property
    def cotangents(self) -> tuple[str, str]:
        """The Values of their cotangents."""
        return f"{self.name}/conv_cotangent", f"{self.name}/recurrent_cotangent"

    def values(self, layers: int, layout: BoundaryLayout, tiers: tuple[Tier, ...] = ALL_TIERS) -> list[Value]:
        """Return the Values of the edge for so many recurrent layers, which may live on ``tiers``."""
        heads, keys, values = layout.recurrent_shape
        shapes = (layers, 1, *layout.conv_shape), (layers, 1, heads * keys, values)
        dtypes = layout.conv_dtype, layout.recurrent_dtype
        found = [*zip(self.states, shapes, dtypes, strict=True)]
        if self.has_cotangent:
            wide = (accumulation_dtype(dtype) for dtype in dtypes)
            found += zip(self.cotangents, shapes, wide, strict=True)
        return [
            Value(
                name=name,
                tensors={"boundary": TensorSpec(shape=shape, dtype=dtype_name(dtype))},
                kind=ValueKind.ORDERED,
                tiers=tiers,
            )
            for name, shape, dtype in found
        ]


@dataclass(frozen=True, kw_only=True)
class ChunkEdges:
    """The edges before and behind a chunk: `models.chunk.Boundaries` is what a stage makes of them.

    ``before`` is None at the start of a sequence, ``after`` where no later token sees the chunk. ``rows`` are the
    pieces of the span's recurrent layers.
    """

    before: Edge | None
    after: Edge | None
    rows: Mapping[int, int]

    def forward_streams(self) -> list[Stream]:
        """Return the streams of the chunk's forward."""
        read = [Stream(values=(name,)) for name in ([] if self.before is None else self.before.states)]
        return read + ([] if self.after is None else [Stream(values=self.after.states, updates=True, buffered=False)])

    def backward_streams(self) -> list[Stream]:
        """Return the streams of the chunk's backward."""
        found = [Stream(values=(name,)) for name in ([] if self.before is None else self.before.states)]
        if self.after is not None and self.after.has_cotangent:
            found += [Stream(values=(name,)) for name in self.after.cotangents]
        if self.before is not None and self.before.has_cotangent:
            if self.before.is_shared:
                found += [Stream(values=(name,), updates=True) for name in self.before.cotangents]
            else:
                found.append(Stream(values=self.before.cotangents, updates=True, buffered=False))
        return found

    def shape(self) -> tuple[object, ...]:
        """Return what decides the workspace that the boundaries take."""
        before, after = self.before, self.after
        return (
            len(self.rows),
            before and (before.has_cotangent, before.is_shared),
            after and after.has_cotangent,
        )


class StageBoundaries:
    """Reads and writes a chunk's boundaries in a stage: `models.chunk.Boundaries`."""

    def __init__(self, context: StageContext, edges: ChunkEdges, layout: BoundaryLayout | None) -> None:
        self._context, self._edges = context, edges
        self._heads = 0 if layout is None else layout.recurrent_shape[0]

    def before(self, layer: int) -> Boundary | None:
        edge = self._edges.before
        return None if edge is None else self._piece(edge.states, layer)

    def cotangent(self, layer: int) -> Boundary | None:
        edge = self._edges.after
        return None if edge is None or not edge.has_cotangent else self._piece(edge.cotangents, layer)

    def keep(self, layer: int, after: Boundary) -> None:
        if self._edges.after is not None:
            for name, parts in zip(self._edges.after.states, _parts(after), strict=True):
                self._context.write_rows(name, self._edges.rows[layer], 0, parts)

    def add_cotangent(self, layer: int, d_before: Boundary) -> None:
        edge = self._edges.before
        if edge is None or not edge.has_cotangent:
            return
        put = self._context.add_rows if edge.is_shared else self._context.write_rows
        for name, parts in zip(edge.cotangents, _parts(d_before), strict=True):
            put(name, self._edges.rows[layer], 0, parts)

    def _piece(self, names: tuple[str, str], layer: int) -> Boundary:
        conv, recurrent = (self._context.piece(name, self._edges.rows[layer]) for name in names)
        return Boundary(conv, recurrent.unflatten(1, (self._heads, -1)))


def _parts(boundary: Boundary) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return the parts of a boundary's pieces along their first axis, the one branch that there is."""
    return boundary.conv.unbind(), boundary.recurrent.flatten(1, 2).unbind()
