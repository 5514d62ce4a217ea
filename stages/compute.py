"""The stages that evaluate a chunk: prefill, score, replay and sweep.

They are two functions, forward and backward of a `ChunkWork`, and their names say what is asked of them:

=========  =========  ==========================  =====================================
stage      direction  keeps state / takes its     scores rows / takes their derivatives
                      cotangents
=========  =========  ==========================  =====================================
prefill    forward    yes                         no
score      forward    if later tokens need it     yes
replay     backward   if later tokens needed it   yes
sweep      backward   yes                         no
=========  =========  ==========================  =====================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engine.plan import TensorSpec
from engine.worker import StageContext
from models.chunk import backward_chunk, forward_chunk
from models.float64 import lifted_casts
from models.geometry import StateLayout
from stages import names
from stages.state import Column, PagedPrefix, read_cotangent, write_state
from stages.tree import Chunk


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How rows are scored: sampling temperature, rows per block, and whether the loss uses entropies."""

    temperature: float
    block_rows: int
    uses_entropies: bool


@dataclass(frozen=True, kw_only=True)
class ChunkWork:
    """One chunk with all that its forward and backward need.

    ``visible`` are the columns that it attends to, with the tokens visible in each; ``own`` are its node's columns
    that its tokens lie in, empty where no later token sees its state.
    """

    name: str
    chunk: Chunk
    visible: tuple[tuple[Column, int], ...]
    own: tuple[Column, ...]
    layout: StateLayout
    head: HeadOptions

    @cached_property
    def scored(self) -> tuple[tuple[int, int, int], ...]:
        """(row, target, place in the canonical order) of the scored tokens."""
        return tuple(self.chunk.scored())

    @property
    def score_tensors(self) -> dict[str, TensorSpec]:
        """What a score stage writes: log-probabilities and entropies of the scored rows."""
        spec = TensorSpec(shape=(len(self.scored),), dtype=self.layout.cotangent_dtype)
        return {"logprobs": spec, "entropies": spec}

    def forward(self, context: StageContext) -> None:
        """Evaluate the chunk without autograd, keep its state if ``own``, score its rows if there are any."""
        model = context.item(names.WEIGHTS)
        with lifted_casts(model.dtype):
            hidden = forward_chunk(
                model,
                context.index(self.chunk.padded_ids),
                first_position=self.chunk.first_position,
                prefix=PagedPrefix(context, self.visible),
                keep_state=self._keeper(context) if self.own else None,
                want_hidden=bool(self.scored),
            )
            if hidden is None:
                return
            rows, targets = self._rows_and_targets(context)
            out = context.tensors(names.scores(self.name))
            logprobs, entropies = model.head_score(
                hidden.flatten(0, 1)[rows],
                targets,
                temperature=self.head.temperature,
                block_rows=self.head.block_rows,
            )
            out["logprobs"].copy_(logprobs)
            out["entropies"].copy_(entropies)

    def backward(self, context: StageContext) -> None:
        """Recompute the chunk with autograd and pull back the derivatives of its scores and its state's cotangents."""
        model = context.item(names.WEIGHTS)
        gradients = dict(context.tensors(names.GRADIENTS))
        if names.HEAD_GRADIENTS in context.stage.updates:
            gradients |= context.tensors(names.HEAD_GRADIENTS)
        model.accumulate_into(gradients)
        with lifted_casts(model.dtype):
            backward_chunk(
                model,
                context.index(self.chunk.padded_ids),
                first_position=self.chunk.first_position,
                prefix=PagedPrefix(context, self.visible),
                state_cotangent=self._cotangents(context) if self._has_cotangents else None,
                head_backward=self._head_backward(context, model) if self.scored else None,
            )
        model.accumulate_into({})

    @property
    def _has_cotangents(self) -> bool:
        return any(column.cotangent is not None for column in self.own)

    def _rows_and_targets(self, context: StageContext) -> tuple[torch.Tensor, torch.Tensor]:
        rows, targets, _ = zip(*self.scored, strict=True)
        return context.index(rows), context.index(targets)

    def _keeper(self, context: StageContext) -> Any:
        def keep(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            write_state(context, self.own, layer, self.chunk.start, key, value)

        return keep

    def _cotangents(self, context: StageContext) -> Any:
        def cotangent(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return read_cotangent(context, self.own, layer, self.chunk.start, self.chunk.stop, self.layout)

        return cotangent

    def _head_backward(self, context: StageContext, model: Any) -> Any:
        derivatives = context.tensors(names.derivatives(self.name))

        def head_backward(hidden_BSC: torch.Tensor) -> torch.Tensor:
            rows, targets = self._rows_and_targets(context)
            d_rows = model.head_backward(
                hidden_BSC.flatten(0, 1)[rows],
                targets,
                derivatives["logprobs"],
                derivatives["entropies"] if self.head.uses_entropies else None,
                temperature=self.head.temperature,
                block_rows=self.head.block_rows,
            )
            d_hidden_BSC = torch.zeros_like(hidden_BSC)
            d_hidden_BSC.flatten(0, 1).index_copy_(0, rows, d_rows)
            return d_hidden_BSC

        return head_backward
