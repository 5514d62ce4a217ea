"""From token trees to a plan: one recursion.

Forward a node's chunks, visit its children; later visit its children and sweep its chunks in reverse. Between the two
stands the loss, which sees every scored token of the step. A group of GRPO is a tree of depth one; deeper trees go
through the same code.

Invariant: accumulators (parameter gradients, cotangents) are updated in the order in which stages are added here, so
the order of every sum is a property of the plan and not of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.budget import Tier
from engine.plan import Cost, Plan, Stage, Stream, Value, digest
from models.geometry import Geometry, StateLayout
from stages import names
from stages.compute import ChunkWork, HeadOptions
from stages.estimate import Estimator
from stages.state import Column, column_values, make_columns
from stages.tree import Chunk, Node, chunks_of, waves_of

Visible = tuple[tuple[Column, int], ...]

VECTOR_TIERS = (Tier.DEVICE, Tier.HOST)
# Vectors of a few numbers a token: a file for each would be absurd.


@dataclass(kw_only=True)
class Lowering:
    """Adds the stages of token trees to a plan. ``works`` collects the scored chunks in the order they are scored."""

    plan: Plan
    sizes: Geometry
    layout: StateLayout
    head: HeadOptions
    estimator: Estimator
    chunk_tokens: int
    branches_at_once: int
    exact: bool
    tied_head: bool
    works: list[ChunkWork] = field(default_factory=list)
    _columns: dict[str, tuple[Column, ...]] = field(default_factory=dict)
    _prompts: set[str] = field(default_factory=set)

    def forward(self, nodes: tuple[Node, ...], path: Visible = (), *, is_prompt: bool = True) -> None:
        """Add the forward stages of a node (or of a wave of sibling leaves) and of everything below it.

        ``is_prompt``: the node is the root of its tree, where ``stop-prompt`` stops the gradient.
        """
        if is_prompt:
            self._prompts.add(nodes[0].name)
        chunks = chunks_of(nodes, self.chunk_tokens)
        columns = self._declare_columns(nodes, chunks)
        for chunk in chunks:
            self._forward_chunk(self._work(chunk, path, columns))
        for wave in self._waves(nodes):
            self.forward(wave, path + _all_of(columns), is_prompt=False)

    def backward(self, nodes: tuple[Node, ...], path: Visible = ()) -> None:
        """Add the backward stages of everything below a node, then of its own chunks from last to first."""
        chunks = chunks_of(nodes, self.chunk_tokens)
        columns = self._columns[nodes[0].name]
        for wave in self._waves(nodes):
            self.backward(wave, path + _all_of(columns))
        for chunk in reversed(chunks):
            work = self._work(chunk, path, columns)
            if work.scored or self._has_cotangents(nodes[0]):
                self._backward_chunk(work)

    def _waves(self, nodes: tuple[Node, ...]) -> list[tuple[Node, ...]]:
        return waves_of(nodes[0].children, chunk_tokens=self.chunk_tokens, branches_at_once=self.branches_at_once)

    def _has_cotangents(self, node: Node) -> bool:
        """Whether the loss reaches a node's state: always, except for the prompt when its gradient is stopped."""
        return self.exact or node.name not in self._prompts

    def _declare_columns(self, nodes: tuple[Node, ...], chunks: Sequence[Chunk]) -> tuple[Column, ...]:
        """Declare the columns of a node's state, as far as later tokens see it."""
        node = nodes[0]
        kept = len(node.inputs) if node.children else (chunks[-1].start if len(nodes) == 1 else 0)
        columns = make_columns(node.name, kept, self.layout, with_cotangents=self._has_cotangents(node))
        for column in columns:
            for value in column_values(column, self.layout):
                self.plan.value(value)
        self._columns[node.name] = columns
        return columns

    def _work(self, chunk: Chunk, path: Visible, columns: tuple[Column, ...]) -> ChunkWork:
        before = [(column, part[1]) for column in columns if (part := column.overlap(0, chunk.start)) is not None]
        own = tuple(column for column in columns if column.overlap(chunk.start, chunk.stop) is not None)
        last = chunk.nodes[-1].name.rsplit("/", 1)[-1] if len(chunk.nodes) > 1 else ""
        name = f"{chunk.nodes[0].name}{'-' + last if last else ''}/tokens{chunk.start}-{chunk.stop}"
        return ChunkWork(name=name, chunk=chunk, visible=(*path, *before), own=own, layout=self.layout, head=self.head)

    def _forward_chunk(self, work: ChunkWork) -> None:
        writes: tuple[str, ...] = ()
        if work.scored:
            self.works.append(work)
            writes = (names.scores(work.name),)
            for name in (names.scores(work.name), names.derivatives(work.name)):
                self.plan.value(Value(name=name, tensors=work.score_tensors, tiers=VECTOR_TIERS))
        streams = [Stream(values=_states(work.visible))]
        if work.own:
            streams.append(Stream(values=tuple(column.state for column in work.own), updates=True, buffered=False))
        self._add(
            Stage(
                name=f"{'score' if work.scored else 'prefill'} {work.name}",
                kind="score" if work.scored else "prefill",
                run=work.forward,
                config=self._config(work),
                reads=(names.WEIGHTS,),
                writes=writes,
                streams=tuple(stream for stream in streams if stream.values),
                cost=self._cost(work, backward=False),
            ),
            work,
        )

    def _backward_chunk(self, work: ChunkWork) -> None:
        states = _states(work.visible)
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
        )
        tied_head = self.tied_head and work.scored
        self._add(
            Stage(
                name=f"{'replay' if work.scored else 'sweep'} {work.name}",
                kind="replay" if work.scored else "sweep",
                run=work.backward,
                config=self._config(work),
                reads=(names.WEIGHTS, *((names.derivatives(work.name),) if work.scored else ())),
                updates=(names.GRADIENTS, *((names.HEAD_GRADIENTS,) if tied_head else ())),
                streams=tuple(stream for stream in streams if stream.values),
                cost=self._cost(work, backward=True),
            ),
            work,
        )

    def _add(self, stage: Stage, work: ChunkWork) -> None:
        longest = max((tokens for _, tokens in work.visible), default=0)
        shape = (
            stage.kind,
            len(work.chunk.nodes),
            work.chunk.tokens,
            longest if stage.kind in ("replay", "sweep") else bool(longest),
            len(work.own),
            len(work.scored),
            self.head,
        )
        workspace = self.estimator.workspace_bytes(shape, stage, self.plan)
        self.plan.add(replace(stage, workspace_bytes=workspace))

    def _config(self, work: ChunkWork) -> dict[str, object]:
        return {
            "ids": digest(work.chunk.padded_ids),
            "scored": digest(work.scored),
            "position": work.chunk.first_position,
            "visible": [tokens for _, tokens in work.visible],
            "temperature": self.head.temperature,
            "head_rows": self.head.block_rows,
        }

    def _cost(self, work: ChunkWork, *, backward: bool) -> Cost:
        rows = len(work.chunk.nodes) * work.chunk.tokens
        cost = self.sizes.backward_cost if backward else self.sizes.forward_cost
        body = cost(
            rows=rows,
            tokens=work.chunk.tokens,
            prefix_tokens=sum(tokens for _, tokens in work.visible),
            pages=len(work.visible),
        )
        return body + self.sizes.head_cost(rows=len(work.scored), backward=backward)


def _all_of(columns: Sequence[Column]) -> Visible:
    return tuple((column, column.tokens) for column in columns)


def _states(visible: Visible) -> tuple[str, ...]:
    return tuple(column.state for column, _ in visible)
