"""The cut of a model into layer spans: contiguous layers whose weights, gradients and optimizer state are one unit.

Each *shard* has a Value of its own for weights, gradients and norms: a span's layers (the embedding with the first,
final norm and head with the last), or a tied embedding, which both ends use. A whole model is the case of one span and
one shard without a name. Its Values are those that stages of a person's own know: ``weights``, which is the model
object, and ``stepN/gradients``, tensors by parameter name; both stay on the device. In a cut model ``weights`` is the
skeleton alone, modules and buffers, and a shard's parameters lie behind each other in one *flat* tensor
(`stages.shard_layout`), which moves and streams in few large pieces; the modules are pointed at views of it while a
stage runs.

A chunk's stage becomes one for every span. Between two spans the hidden state is a Value, and in the backward its
cotangent. All chunks go through a span before the next one begins, so a span is fetched once a pass.

Invariant: every parameter's gradient is the same sum in the same order as with one span, so all bits are the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.plan import TensorSpec, Value, ValueKind
from engine.tensors import dtype_name
from models.dense import EMBEDDING_GRADIENT
from stages import names
from stages.shard_layout import FLAT, ShardLayout

EMBEDDING = "embedding"
"""The shard of a tied embedding."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Layers ``layers`` of a model of ``num_layers``; number ``index`` of the spans, before number ``next_index``.

    ``recurrent`` are those of the span's layers whose state is a boundary; that of the others is in pages.
    """

    index: int
    layers: range
    num_layers: int
    next_index: int
    recurrent: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    @cached_property
    def attention_rows(self) -> dict[int, int]:
        """The span's layers with attention, numbered."""
        return {layer: row for row, layer in enumerate(layer for layer in self.layers if layer not in self.recurrent)}

    @cached_property
    def recurrent_rows(self) -> dict[int, int]:
        """The span's recurrent layers, numbered."""
        return {layer: row for row, layer in enumerate(self.recurrent)}

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Whether each layer is recurrent, in order."""
        return tuple(layer in self.recurrent_rows for layer in self.layers)

    @property
    def shard(self) -> str:
        """The name of the shard with the span's layers."""
        return "" if self.is_whole else f"span{self.index}"

    def of(self, name: str) -> str:
        """Return the name of what ``name`` has in this span."""
        return names.of_shard(name, self.shard)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model's spans, and its shards' parameters in the order of ``named_parameters()``."""

    spans: tuple[Span, ...]
    shards: Mapping[str, Mapping[str, TensorSpec]]

    @property
    def is_whole(self) -> bool:
        return len(self.spans) == 1

    @cached_property
    def has_embedding_apart(self) -> bool:
        """Whether there is a shard of a tied embedding alone."""
        return EMBEDDING in self.shards

    @property
    def embedding_shard(self) -> str:
        """The name of the shard with the embedding."""
        return EMBEDDING if self.has_embedding_apart else self.spans[0].shard

    def outline(self) -> Cut:
        """Return the cut with each kind of span once: the others need the same bytes of the device as one of them."""
        kinds: dict[Hashable, Span] = {}
        for span in self.spans:
            kinds.setdefault((span.is_first, span.is_last, span.kinds, self._sizes_of(span)), span)
        kept = list(kinds.values())
        followed = [replace(span, next_index=after.index) for span, after in pairwise(kept)]
        shards = {EMBEDDING, *(span.shard for span in kept)}
        return Cut(
            spans=(*followed, kept[-1]),
            shards={name: parameters for name, parameters in self.shards.items() if name in shards},
        )

    def _sizes_of(self, span: Span) -> Hashable:
        return tuple((spec.shape, spec.dtype) for spec in self.shards.get(span.shard, {}).values())

    def shards_of(self, span: Span, *, with_head: bool) -> tuple[str, ...]:
        """Return the shards that a stage of a span needs; ``with_head`` if it has scored rows."""
        is_end = span.is_first or (span.is_last and with_head)
        return (*((EMBEDDING,) if is_end and self.has_embedding_apart else ()), span.shard)


def cut_model(
    parameters: Mapping[str, TensorSpec],
    *,
    num_layers: int,
    num_spans: int,
    tied: bool,
    recurrent: Collection[int] = (),
) -> Cut:
    """Cut a model into spans of about equal bytes, each of at least one layer; ``recurrent`` are its recurrent ones."""
    layer_of = {name: int(found[1]) for name in parameters if (found := _LAYER.search(name))}
    ends = {name: 0 if name == EMBEDDING_GRADIENT else num_layers - 1 for name in parameters}
    apart = {EMBEDDING_GRADIENT} if tied and num_spans > 1 else set()
    nbytes = [0] * num_layers
    for name, spec in parameters.items():
        nbytes[layer_of.get(name, ends[name])] += 0 if name in apart else spec.nbytes
    spans, start = [], 0
    for index in range(num_spans):
        stop = _stop(nbytes, start, num_spans - index)
        layers = range(start, stop)
        mine = tuple(layer for layer in layers if layer in recurrent)
        spans.append(Span(index=index, layers=layers, num_layers=num_layers, next_index=index + 1, recurrent=mine))
        start = stop
    shards: dict[str, dict[str, TensorSpec]] = {EMBEDDING: {}} if apart else {}
    shards |= {span.shard: {} for span in spans}
    span_of = {layer: span.shard for span in spans for layer in span.layers}
    for name, spec in parameters.items():
        shards[EMBEDDING if name in apart else span_of[layer_of.get(name, ends[name])]][name] = spec
    return Cut(spans=tuple(spans), shards=shards)


def _stop(nbytes: list[int], start: int, num_spans: int) -> int:
    """Return where the span ends that begins at layer ``start``, so that ``num_spans`` have about the same bytes."""
    share, stop = sum(nbytes[start:]) / num_spans, start + 1
    last = len(nbytes) - (num_spans - 1)
    while stop < last and sum(nbytes[start:stop]) + nbytes[stop] / 2 <= share:
        stop += 1
    return last if num_spans == 1 else stop


def flat_value(name: str, layout: ShardLayout, dtype: str, kind: ValueKind) -> Value:
    """Return the Value of the weights or gradients of a cut model's shard."""
    return Value(name=name, tensors={FLAT: layout.flat_spec(dtype)}, kind=kind)


def gradients_value(update: str, layout: ShardLayout) -> Value:
    """Return the Value of a shard's gradients."""
    name, wide, kind = names.gradients(update, layout.shard), dtype_name(layout.wide), ValueKind.ACCUMULATOR
    if layout.is_flat:
        return flat_value(name, layout, wide, kind)
    tensors = {parameter: TensorSpec(shape=spec.shape, dtype=wide) for parameter, spec in layout.parameters.items()}
    return Value(name=name, tensors=tensors, kind=kind, tiers=(Tier.DEVICE,))


@contextmanager
def attached(context: StageContext, model: Any, shards: Mapping[str, ShardLayout]) -> Iterator[None]:
    """Point the model's parameters at the flat weights of ``shards`` meanwhile."""
    views: dict[str, torch.Tensor] = {}
    for layout in shards.values():
        if layout.is_flat:
            views |= layout.of_value(context, names.shard_weights(layout.shard))
    model.attach(views)
    try:
        yield
    finally:
        model.detach()
