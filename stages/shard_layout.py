"""How the parameters of a shard lie in flat vectors: those of its optimizer's state, its weights and its gradients.

A *shard* is a part of the model that has Values of its own (`stages.spans`), or all of it. Its parameters, in the order
of ``named_parameters()``, lie behind each other in one flat vector, which is cut into *pieces* of equal length. A
*part* is what a piece has of one parameter.

The optimizer's state always lies so. Weights and gradients do where the model is cut, and are *flat* then: one tensor
with a piece a row, which moves and streams as the state does. Those of a whole model are tensors by parameter name. Who
works on them asks the layout and need not know which it is.

Invariant: parameters begin, and are cut, at multiples of `LANES` elements, so that vector kernels round as they would
on whole parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from engine.context import StageContext
from engine.plan import Stream, TensorSpec
from models.float64 import accumulation_dtype

PIECE_ELEMENTS = 2**20
# Large enough that Python and the disk's seeks do not count, small enough that a piece (12 MiB in float32) hides in any
# stage's workspace.

LANES = 32
# 64 bytes of bfloat16, the widest vector of any CPU: a kernel's scalar remainder rounds otherwise than its vector body.

FLAT = "flat"
"""The tensor of a Value that has the parameters' numbers in the layout of their state."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements ``start`` to ``start + count`` of a parameter, which lie from ``first`` on in their piece."""

    parameter: str
    start: int
    first: int
    count: int

    def of_piece(self, row: torch.Tensor) -> torch.Tensor:
        """Return the part's elements of a piece's row."""
        return row if row.shape[0] == self.count else row[self.first : self.first + self.count]

    def of_parameter(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the part's elements of a tensor that is shaped like its parameter. Call it without autograd."""
        flat = tensors[self.parameter].view(-1)
        return flat if flat.shape[0] == self.count else flat[self.start : self.start + self.count]


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The layout of a shard's ``parameters``, whose weights are in ``dtype``.

    ``shard`` names the part of the model that they are, where they are not all of it.
    """

    parameters: Mapping[str, TensorSpec]
    dtype: torch.dtype
    shard: str = ""

    @property
    def is_flat(self) -> bool:
        """Whether weights and gradients lie in flat tensors, which may be on any tier, and not by parameter name."""
        return bool(self.shard)

    @cached_property
    def wide(self) -> torch.dtype:
        """The dtype of gradients, moments and masters."""
        return accumulation_dtype(self.dtype)

    @property
    def num_elements(self) -> int:
        return sum(spec.num_elements for spec in self.parameters.values())

    @cached_property
    def piece_elements(self) -> int:
        """Elements of a piece: pieces are as long as the largest parameter, or less, and all used to the end."""
        lengths = [_padded(spec.num_elements) for spec in self.parameters.values()]
        longest = min(_padded(PIECE_ELEMENTS), max(lengths))
        num_pieces = -(-sum(lengths) // longest)
        return _padded(-(-sum(lengths) // num_pieces))

    @cached_property
    def pieces(self) -> tuple[tuple[Part, ...], ...]:
        """The parts of every piece."""
        pieces: list[list[Part]] = []
        room = 0
        for name, spec in self.parameters.items():
            start = 0
            while start < spec.num_elements:
                if not room:
                    pieces.append([])
                    room = self.piece_elements
                count = min(spec.num_elements - start, room)
                pieces[-1].append(Part(parameter=name, start=start, first=self.piece_elements - room, count=count))
                start += count
                room -= _padded(count)
        return tuple(map(tuple, pieces))

    @property
    def most_parts(self) -> int:
        """The most parts of any piece."""
        return max(map(len, self.pieces))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a piece."""
        return self.piece_elements * self.wide.itemsize

    def flat_spec(self, dtype: str) -> TensorSpec:
        """Return the size of a tensor that has a number for every one of the parameters', laid out like a row."""
        return TensorSpec(shape=(len(self.pieces), self.piece_elements), dtype=dtype)

    def of_value(self, context: StageContext, name: str) -> Mapping[str, torch.Tensor]:
        """Return what a resident Value has for the parameters, by name: the model's own, or views of a flat tensor."""
        if context.is_provided(name):
            return dict(context.item(name).hf.named_parameters())
        tensors = context.tensors(name)
        return self._views(tensors[FLAT]) if FLAT in tensors else tensors

    def numbers(self, context: StageContext, name: str) -> Iterator[list[torch.Tensor]]:
        """Yield what a Value that the stage looks at (`looked_at`) has for every piece's parts, good until the next."""
        tensors = {} if self.is_flat else self.of_value(context, name)
        for number, parts in enumerate(self.pieces):
            if self.is_flat:
                piece = context.piece(name, number)
                yield [part.of_piece(piece) for part in parts]
            else:
                yield [part.of_parameter(tensors) for part in parts]

    def _views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = flat.view(-1)
        starts = {
            part.parameter: number * self.piece_elements + part.first
            for number, parts in enumerate(self.pieces)
            for part in parts
            if not part.start
        }
        return {
            name: rows[starts[name] : starts[name] + spec.num_elements].view(spec.shape)
            for name, spec in self.parameters.items()
        }


def _padded(count: int) -> int:
    return -(-count // LANES) * LANES


def looked_at(
    values: Mapping[str, ShardLayout], *, is_passed: bool = True
) -> tuple[tuple[str, ...], tuple[Stream, ...]]:
    """Return how a stage looks at weights or gradients of shards: what it reads, and the flat ones, which it streams.

    ``is_passed`` false is for a stage that goes through none of their pieces itself.
    """
    reads = tuple(value for value, layout in values.items() if not layout.is_flat)
    flat = tuple(value for value, layout in values.items() if layout.is_flat)
    pieces = () if is_passed else (0,) * len(flat)
    return reads, (Stream(values=flat, pieces=pieces),) if flat else ()
