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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.context import StageContext
from engine.plan import TensorSpec
from models.chunk import backward_chunk, forward_chunk
from models.dense import EMBEDDING_GRADIENT, HEAD_GRADIENT
from models.float64 import lifted_casts
from models.geometry import StateLayout
from stages import names
from stages.boundary import ChunkEdges, StageBoundaries
from stages.kept import ChunkInputs, KeptInputs
from stages.optimizer import OptimizerState
from stages.sampled import read_responses
from stages.spans import Span, attached
from stages.state import Column, PagedPrefix, Visible, page_runs, read_cotangent, write_state
from stages.tree import Batch, Chunk, Responses

ENTRY = "hidden"
# The tensor of a hidden state between spans, and of its cotangent: [branches * tokens, hidden size].


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
    that its tokens lie in, empty where no later token sees its state; ``edges`` are those before and behind it.
    ``kept`` is what its forward keeps for its backward. ``span`` are the layers it goes through, ``shards`` the weights
    that it takes for that. ``update`` is the prefix of the update it belongs to. Where tokens are sampled, Values have
    room for the most there can be and the first of them are used.
    """

    name: str
    update: str
    chunk: Chunk
    visible: Visible
    own: tuple[Column, ...]
    edges: ChunkEdges
    kept: KeptInputs | None
    span: Span
    shards: Mapping[str, OptimizerState]
    layout: StateLayout
    head: HeadOptions

    @property
    def max_rows(self) -> int:
        """The number of scored rows, at most."""
        return self.chunk.max_rows

    @property
    def scores_rows(self) -> bool:
        """Whether rows meet the head behind these layers."""
        return bool(self.max_rows) and self.span.is_last

    @property
    def score_tensors(self) -> dict[str, TensorSpec]:
        """What a score stage writes: log-probabilities and entropies of the scored rows."""
        spec = TensorSpec(shape=(self.max_rows,), dtype=self.layout.cotangent_dtype)
        return {"logprobs": spec, "entropies": spec}

    def batch(self, context: StageContext) -> Batch:
        """Return what is evaluated."""
        return self.chunk.resolve({name: read_responses(context, name) for name in self.chunk.rollouts})

    def known(self, responses: Responses) -> ChunkWork | None:
        """Return the same work with its sampled tokens known; None if nothing was sampled that far."""
        batch = self.chunk.resolve(responses)
        if not batch.num_tokens:
            return None
        nodes = tuple(
            replace(node, content=tokens) for node, tokens in zip(self.chunk.nodes, batch.tokens, strict=True)
        )
        return replace(self, chunk=Chunk(nodes=nodes, start=self.chunk.start, stop=self.chunk.start + batch.num_tokens))

    def forward(self, context: StageContext) -> None:
        """Evaluate the chunk without autograd, keep its state if ``own``, score its rows if there are any."""
        batch = self.batch(context)
        if not batch.num_tokens:
            return
        model = context.item(names.WEIGHTS)
        with attached(context, model, self.shards), lifted_casts(model.dtype):
            hidden = forward_chunk(
                model,
                self._ids(context, batch),
                first_position=self.chunk.first_position,
                prefix=self._prefix(context),
                boundaries=StageBoundaries(context, self.edges, self.layout.boundary),
                keep_state=self._keeper(context) if self.own else None,
                want_hidden=self.scores_rows or not self.span.is_last,
                inputs=self._inputs(context, batch),
                layers=self.span.layers,
                entry_BSC=self._entry(context),
            )
            if hidden is not None and self.span.is_last:
                self._score(context, model, batch, hidden)
            elif hidden is not None:
                following = context.tensors(names.entry(self.name, self.span.next_index))
                following[ENTRY].copy_(hidden.flatten(0, 1))

    def _score(self, context: StageContext, model: Any, batch: Batch, hidden_BSC: torch.Tensor) -> None:
        rows, targets = _rows_and_targets(context, batch)
        out = context.tensors(names.scores(self.name))
        logprobs, entropies = model.head_score(
            hidden_BSC.flatten(0, 1)[rows],
            targets,
            temperature=self.head.temperature,
            block_rows=self.head.block_rows,
        )
        out["logprobs"][: len(rows)].copy_(logprobs)
        out["entropies"][: len(rows)].copy_(entropies)

    def backward(self, context: StageContext) -> None:
        """Recompute the chunk with autograd and pull back the derivatives of its scores and its state's cotangents."""
        batch = self.batch(context)
        if not batch.num_tokens:
            return
        model = context.item(names.WEIGHTS)
        model.accumulate_into(*self._accumulators(context))
        with attached(context, model, self.shards), lifted_casts(model.dtype):
            d_entry = backward_chunk(
                model,
                self._ids(context, batch),
                first_position=self.chunk.first_position,
                prefix=self._prefix(context),
                boundaries=StageBoundaries(context, self.edges, self.layout.boundary),
                state_cotangent=self._cotangents(context, batch) if self._has_cotangents else None,
                head_backward=self._head_backward(context, model, batch) if self.scores_rows else None,
                inputs=self._inputs(context, batch),
                layers=self.span.layers,
                entry_BSC=self._entry(context),
                d_out_BSC=self._d_out(context),
            )
            if d_entry is not None and not self.span.is_first:
                context.tensors(names.entry_cotangent(self.name, self.span.index))[ENTRY].copy_(d_entry.flatten(0, 1))
        model.accumulate_into({})

    def _accumulators(self, context: StageContext) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Return the accumulators by the names of `models.dense`, and the ids of the embedding's rows if not all."""
        updates, gradients = context.stage.updates, dict[str, torch.Tensor]()
        for shard, state in self.shards.items():
            if (name := names.gradients(self.update, shard)) in updates:
                gradients |= state.of_value(context, name)
        if EMBEDDING_GRADIENT in gradients:  # where it is tied, the head adds to it, too
            gradients.setdefault(HEAD_GRADIENT, gradients[EMBEDDING_GRADIENT])
        if (head := names.head_gradients(self.update)) in updates:
            gradients |= context.tensors(head)
        if (lookup := names.lookup(self.update)) not in updates:
            return gradients, None
        gradients[EMBEDDING_GRADIENT] = context.tensors(lookup)["rows"]
        return gradients, context.tensors(names.lookup_ids(self.update))["ids"]

    def config(self) -> dict[str, object]:
        """Return what decides the result besides the inputs, for the recipe key."""
        return {
            "tokens": self.chunk.contents,
            "span": [self.chunk.start, self.chunk.stop],
            "position": self.chunk.first_position,
            "visible": page_runs(self.visible),
            "temperature": self.head.temperature,
            "head_rows": self.head.block_rows,
            "layers": [self.span.layers.start, self.span.layers.stop],
        }

    @property
    def _has_cotangents(self) -> bool:
        return any(column.cotangent is not None for column in self.own)

    def _ids(self, context: StageContext, batch: Batch) -> torch.Tensor | None:
        return context.index(batch.padded_ids) if self.span.is_first else None

    def _prefix(self, context: StageContext) -> PagedPrefix:
        return PagedPrefix(context, self.visible, self.span.attention_rows)

    def _entry(self, context: StageContext) -> torch.Tensor | None:
        """Return the hidden state with which the chunk enters the span, ``[B, S, C]``; None for the embedding."""
        if self.span.is_first:
            return None
        return self._branches(context.tensors(names.entry(self.name, self.span.index))[ENTRY])

    def _d_out(self, context: StageContext) -> torch.Tensor | None:
        """Return the cotangent of the hidden state with which the chunk leaves the span; None behind the last one."""
        if self.span.is_last:
            return None
        return self._branches(context.tensors(names.entry_cotangent(self.name, self.span.next_index))[ENTRY])

    def _branches(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(self.chunk.nodes), -1, rows.shape[1])

    def _inputs(self, context: StageContext, batch: Batch) -> ChunkInputs | None:
        return None if self.kept is None else ChunkInputs(context, self.kept, num_tokens=batch.num_tokens)

    def _keeper(self, context: StageContext) -> Any:
        def keep(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            write_state(context, self.own, self.span.attention_rows[layer], self.chunk.start, key, value)

        return keep

    def _cotangents(self, context: StageContext, batch: Batch) -> Any:
        stop = self.chunk.start + batch.num_tokens

        def cotangent(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = self.span.attention_rows[layer]
            return read_cotangent(context, self.own, row, self.chunk.start, stop, self.layout)

        return cotangent

    def _head_backward(self, context: StageContext, model: Any, batch: Batch) -> Any:
        derivatives = context.tensors(names.derivatives(self.name))

        def head_backward(hidden_BSC: torch.Tensor) -> torch.Tensor:
            rows, targets = _rows_and_targets(context, batch)
            d_rows = model.head_backward(
                hidden_BSC.flatten(0, 1)[rows],
                targets,
                derivatives["logprobs"][: len(rows)],
                derivatives["entropies"][: len(rows)] if self.head.uses_entropies else None,
                temperature=self.head.temperature,
                block_rows=self.head.block_rows,
            )
            d_hidden_BSC = torch.zeros_like(hidden_BSC)
            d_hidden_BSC.flatten(0, 1).index_copy_(0, rows, d_rows)
            return d_hidden_BSC

        return head_backward


def _rows_and_targets(context: StageContext, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    rows, targets, _, _ = zip(*batch.scored(), strict=True)
    return context.index(rows), context.index(targets)
