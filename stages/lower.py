"""From token trees to a plan: one recursion.

Forward a node's chunks, visit its children; later visit its children and sweep its chunks in reverse. Between the two
stands the loss, which sees every scored token of the step. A group of GRPO is a tree of depth one; deeper trees go
through the same code.

Invariant: accumulators (parameter gradients, cotangents) are updated in the order in which stages are added here, so
the order of every sum is a property of the plan and not of the schedule.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.budget import Tier
from engine.origin import caller_origin
from engine.plan import Cost, Plan, Stage, Stream, TensorSpec, Value, movable
from models.geometry import Geometry, StateLayout
from stages import names
from stages.boundary import ChunkEdges, Edge
from stages.compute import ENTRY, ChunkWork, HeadOptions
from stages.costs import ChunkCosts
from stages.estimate import Estimator
from stages.kept import kept_inputs
from stages.optimizer import OptimizerState
from stages.sampled import VECTOR_TIERS
from stages.spans import EMBEDDING, Cut, Span
from stages.state import Column, Visible, before, between, column_values, make_columns, num_pages, whole
from stages.tree import Chunk, Node, chunks_of, waves_of


@dataclass(frozen=True, kw_only=True)
class _Own:
    """The state of a node's own tokens: its columns, and the edges before and behind each of its chunks."""

    columns: Visible
    edges: tuple[Edge | None, ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """The state of a node with all before it: columns, and the edge behind its last chunk."""

    columns: Visible = ()
    edge: Edge | None = None

    def with_own(self, own: _Own) -> Path:
        """Return the path behind a node that begins behind this one."""
        return Path(columns=self.columns + own.columns, edge=own.edges[-1])


@dataclass(kw_only=True)
class Lowering:
    """Adds the stages of the token trees of one update to a plan.

    ``update`` is the update's prefix; ``state_tiers`` are those that state, cotangents and stored inputs may live on.
    ``cut`` are the model's layer spans, ``shards`` the layout of their weights; stages are added a span at a time, the
    backward's from the last span to the first. ``head_apart`` and ``lookup_apart`` say whether a tied embedding's
    gradient has an accumulator beside the parameters' own for the head's share, or for the look-up's (`stages.lookup`);
    if it is tied, one of them is so.
    ``works`` collects the scored chunks in the order in which they are scored, ``sampled`` the stages whose tokens are
    sampled, which may turn out to need less than is planned for them.
    """

    plan: Plan
    update: str
    sizes: Geometry
    costs: ChunkCosts
    layout: StateLayout
    head: HeadOptions
    estimator: Estimator
    chunk_tokens: int
    branches_at_once: int
    stored_inputs: int
    state_tiers: tuple[Tier, ...]
    exact: bool
    cut: Cut
    shards: Mapping[str, OptimizerState]
    head_apart: bool
    lookup_apart: bool
    origin: str = field(default_factory=caller_origin)
    works: list[ChunkWork] = field(default_factory=list)
    sampled: list[tuple[Stage, ChunkWork]] = field(default_factory=list)
    _states: dict[tuple[str, int], _Own] = field(default_factory=dict)
    _prompts: set[str] = field(default_factory=set)
    _chunks: dict[tuple[str, ...], list[Chunk]] = field(default_factory=dict)
    _known_costs: dict[Hashable, Cost] = field(default_factory=dict)

    def forward_prompt(self, tree: Node, span: Span) -> Path:
        """Add the forward stages of a tree's root, where ``stop-prompt`` stops the gradient; return its state."""
        self._prompts.add(tree.name)
        return self._forward_own((tree,), Path(), span)

    def forward_below(self, nodes: tuple[Node, ...], path: Path, span: Span) -> None:
        """Add the forward stages of everything below a node whose state, with all before it, is ``path``."""
        for wave in self._waves(nodes):
            self.forward_below(wave, self._forward_own(wave, path, span), span)

    def _forward_own(self, nodes: tuple[Node, ...], path: Path, span: Span) -> Path:
        """Add the forward stages of a node (or of a wave of sibling leaves); return its state with all before it."""
        chunks = self._chunks_of(nodes)
        own = self._states[nodes[0].name, span.index] = _Own(
            columns=whole(self._declare_columns(nodes, chunks, span)),
            edges=self._declare_edges(nodes, chunks, span, path.edge),
        )
        for number in range(len(chunks)):
            self._forward_chunk(self._work(chunks, number, path, own, span))
        return path.with_own(own)

    def backward(self, nodes: tuple[Node, ...], span: Span, path: Path | None = None) -> None:
        """Add the backward stages of everything below a node, then of its own chunks from last to first."""
        path = Path() if path is None else path
        chunks = self._chunks_of(nodes)
        own = self._states[nodes[0].name, span.index]
        for wave in self._waves(nodes):
            self.backward(wave, span, path.with_own(own))
        for number in reversed(range(len(chunks))):
            if self._is_differentiated(chunks[number]):
                self._backward_chunk(self._work(chunks, number, path, own, span))

    def _chunks_of(self, nodes: tuple[Node, ...]) -> list[Chunk]:
        """Return a node's chunks, which are the same in every span and in the backward."""
        key = tuple(node.name for node in nodes)
        if key not in self._chunks:
            self._chunks[key] = chunks_of(nodes, self.chunk_tokens)
        return self._chunks[key]

    def _waves(self, nodes: tuple[Node, ...]) -> list[tuple[Node, ...]]:
        return waves_of(nodes[0].children, chunk_tokens=self.chunk_tokens, branches_at_once=self.branches_at_once)

    def _is_differentiated(self, chunk: Chunk) -> bool:
        """Whether a chunk has a backward."""
        return bool(chunk.max_rows) or self._has_cotangents(chunk.nodes[0])

    def _has_cotangents(self, node: Node) -> bool:
        """Whether the loss reaches a node's state: always, except for the prompt when its gradient is stopped."""
        return self.exact or node.name not in self._prompts

    def _declare_columns(self, nodes: tuple[Node, ...], chunks: Sequence[Chunk], span: Span) -> tuple[Column, ...]:
        """Declare the columns of a node's state, as far as later tokens see it."""
        node = nodes[0]
        kept = node.max_inputs if node.children else (chunks[-1].start if len(nodes) == 1 else 0)
        if not span.attention_rows:
            return ()
        layout = replace(self.layout, layers=len(span.attention_rows))
        columns = make_columns(span.of(node.name), kept, layout, with_cotangents=self._has_cotangents(node))
        for column in columns:
            for value in column_values(column, layout, self.state_tiers):
                self.plan.value(value)
        return columns

    def _declare_edges(
        self, nodes: tuple[Node, ...], chunks: Sequence[Chunk], span: Span, before: Edge | None
    ) -> tuple[Edge | None, ...]:
        """Declare the edges of a node's chunks; return that before each of them, and the one behind the last.

        ``before`` is that before the first.
        """
        node, layout = nodes[0], self.layout.boundary
        if layout is None or not span.recurrent:
            return (None,) * (len(chunks) + 1)
        edges: list[Edge | None] = [before]
        for number in range(1, len(chunks) + 1):
            is_last = number == len(chunks)
            if is_last and not node.children:
                edges.append(None)
                continue
            name = span.of(f"{node.name}/edge/{number}")
            edge = Edge(name=name, has_cotangent=self._has_cotangents(node), is_shared=is_last)
            for value in edge.values(len(span.recurrent), layout, self.state_tiers):
                self.plan.value(value)
            edges.append(edge)
        return tuple(edges)

    def _work(self, chunks: Sequence[Chunk], number: int, path: Path, own: _Own, span: Span) -> ChunkWork:
        chunk = chunks[number]
        last = chunk.nodes[-1].name.rsplit("/", 1)[-1] if len(chunk.nodes) > 1 else ""
        name = f"{chunk.nodes[0].name}{'-' + last if last else ''}/tokens{chunk.start}-{chunk.stop}"
        level = self.stored_inputs if self._is_differentiated(chunk) else 0
        return ChunkWork(
            name=name,
            update=self.update,
            chunk=chunk,
            visible=path.columns + before(own.columns, chunk.start),
            own=between(own.columns, chunk.start, chunk.stop),
            edges=ChunkEdges(before=own.edges[number], after=own.edges[number + 1], rows=span.recurrent_rows),
            kept=kept_inputs(
                span.of(name), chunk, self.sizes, self.layout, level=level, span=span, tiers=self.state_tiers
            ),
            span=span,
            shards={shard: self.shards[shard] for shard in self.cut.shards_of(span, with_head=bool(chunk.max_rows))},
            layout=self.layout,
            head=self.head,
        )

    def _forward_chunk(self, work: ChunkWork) -> None:
        writes: tuple[str, ...] = ()
        if not work.span.is_last:
            writes = (self._declare_between(names.entry(work.name, work.span.next_index), work),)
        elif work.scores_rows:
            self.works.append(work)
            writes = (names.scores(work.name),)
            for name in (names.scores(work.name), names.derivatives(work.name)):
                self.plan.value(Value(name=name, tensors=work.score_tensors, tiers=VECTOR_TIERS, origin=self.origin))
        streams = [Stream(values=_names_of(work.visible))]
        if work.own:
            streams.append(Stream(values=tuple(column.state for column in work.own), updates=True, buffered=False))
        if work.kept is not None:
            for value in work.kept.values:
                self.plan.value(value)
            streams.append(work.kept.written())
        streams += work.edges.forward_streams()
        self._add(
            work,
            name=f"{'score' if work.max_rows else 'prefill'} {work.span.of(work.name)}",
            kind="score" if work.max_rows else "prefill",
            run=work.forward,
            config=work.config(),
            reads=(*self._weights(work), *work.chunk.rollouts),
            writes=writes,
            streams=tuple(stream for stream in streams if stream.values),
            cost=self._cost(work, backward=False),
        )

    def _declare_between(self, name: str, work: ChunkWork) -> str:
        """Declare what a chunk hands from span to span, a hidden state or its cotangent; return its name."""
        shape = (len(work.chunk.nodes) * work.chunk.max_tokens, self.sizes.hidden)
        value = movable(name, {ENTRY: TensorSpec(shape=shape, dtype=self.layout.dtype)}, origin=self.origin)
        tiers = tuple(dict.fromkeys((Tier.DEVICE, *self.state_tiers)))  # it is on the device while stages use it
        self.plan.value(replace(value, tiers=tuple(tier for tier in value.tiers if tier in tiers)))
        return name

    def _weights(self, work: ChunkWork) -> tuple[str, ...]:
        """Return the Values with a chunk's weights, and with the hidden state that enters its layers."""
        entry = () if work.span.is_first else (names.entry(work.name, work.span.index),)
        return tuple(dict.fromkeys((names.WEIGHTS, *map(names.shard_weights, work.shards), *entry)))

    def _accumulators(self, work: ChunkWork) -> tuple[str, ...]:
        """Return the accumulators of the gradients that a chunk's backward adds to."""
        update, looks_up, scores = self.update, work.span.is_first, work.scores_rows
        adds_to_embedding = (looks_up and not self.lookup_apart) or (scores and not self.head_apart)
        found = [names.gradients(update, work.span.shard)]
        found += [names.gradients(update, EMBEDDING)] if self.cut.has_embedding_apart and adds_to_embedding else []
        found += [names.head_gradients(update)] if self.head_apart and scores else []
        return (*found, *((names.lookup(update),) if self.lookup_apart and looks_up else ()))

    def _backward_chunk(self, work: ChunkWork) -> None:
        states = _names_of(work.visible)
        cotangents = tuple(
            dict.fromkeys(
                column.cotangent
                for column in [*(column for column, _ in work.visible), *work.own]
                if column.cotangent is not None
            )
        )
        streams = (
            Stream(values=states),
            Stream(values=cotangents, updates=True),
            *(() if work.kept is None else work.kept.read()),
            *work.edges.backward_streams(),
        )
        span, reads = work.span, [*self._weights(work), *work.chunk.rollouts]
        if not span.is_last:
            reads.append(names.entry_cotangent(work.name, span.next_index))
        elif work.max_rows:
            reads.append(names.derivatives(work.name))
        if self.lookup_apart and span.is_first:
            reads.append(names.lookup_ids(self.update))
        given = names.entry_cotangent(work.name, span.index)
        self._add(
            work,
            name=f"{'replay' if work.max_rows else 'sweep'} {span.of(work.name)}",
            kind="replay" if work.max_rows else "sweep",
            run=work.backward,
            config=work.config(),
            reads=tuple(reads),
            updates=self._accumulators(work),
            writes=() if span.is_first else (self._declare_between(given, work),),
            streams=tuple(stream for stream in streams if stream.values),
            cost=self._cost(work, backward=True),
        )

    def _add(self, work: ChunkWork, *, kind: str, **parts: Any) -> None:
        """Add a stage; it is made twice where its workspace has to be found first."""
        known = self.estimator.known_workspace_bytes(self._shape(kind, work))
        stage = Stage(kind=kind, workspace_bytes=known or 0, origin=self.origin, **parts)
        if known is None:
            stage = replace(stage, workspace_bytes=self.workspace_bytes(stage, work))
        self.plan.add(stage)
        if work.chunk.rollouts:
            self.sampled.append((stage, work))

    def workspace_bytes(self, stage: Stage, work: ChunkWork) -> int:
        """Return the device bytes that a stage needs beyond its Values and buffers."""
        return self.estimator.workspace_bytes(self._shape(stage.kind, work), stage, self.plan)

    def _shape(self, kind: str, work: ChunkWork) -> Hashable:
        """Return what decides the workspace of a chunk's stage."""
        backward = kind in ("replay", "sweep")
        longest = max([min(tokens, column.page_tokens) for column, tokens in work.visible], default=0)
        return (
            kind,
            len(work.chunk.nodes),
            work.chunk.max_tokens,
            longest if backward else bool(longest),
            len(work.own),
            work.edges.shape(),
            (work.max_rows, self.head) if work.scores_rows else None,
            (work.span.kinds, work.span.is_first, work.span.is_last),
            self.stored_inputs if work.kept is not None else 0,
        )

    def workspace_at(self, lengths: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the workspace that stages of sampled tokens need, by name, where responses have ``lengths``."""
        responses = {name: [[0] * length for length in row] for name, row in lengths.items()}
        found = {}
        for stage, work in self.sampled:
            known = work.known(responses)
            if known is None:
                found[stage.name] = 0
                continue
            run = known.forward if stage.kind == "score" else known.backward
            found[stage.name] = self.workspace_bytes(replace(stage, run=run), known)
        return found

    def _cost(self, work: ChunkWork, *, backward: bool) -> Cost:
        """Return the cost of a chunk in a span; spans of the same kinds of layers have the same, but for the last."""
        key = (work.name, work.span.kinds, work.span.is_last, backward)
        if key not in self._known_costs:
            cost = self.costs.backward if backward else self.costs.forward
            prefix_tokens, pages = work.chunk.first_position, num_pages(work.visible)
            self._known_costs[key] = cost(work.chunk, work.span, prefix_tokens=prefix_tokens, pages=pages)
        return self._known_costs[key]


def _names_of(visible: Visible) -> tuple[str, ...]:
    return tuple(column.state for column, _ in visible)
