"""The token tree of a step: tokens arranged by shared prefix.

A group is a trunk (the prompt without its last token) with one leaf per response. The last prompt token opens every
leaf, so prompt rows never meet the head; a leaf's inputs are that token and the response without its last one, and
each input row predicts the next token. Leaves end at their last trainable token: what comes after it is never
scored and nobody sees it. A leaf without trainable tokens is left out (it still counts in the loss), and a group
without leaves needs no evaluation.

A node's tokens are known when the plan is made (`Tokens`), or are sampled while it runs (`Sampled`): then the plan
knows how many there are at most, and the worker looks them up (`Node.resolve`).

Invariant: the scored rows of all leaves, in the order of groups, responses and positions, are the trainable tokens of
the step in canonical order: a scored row is known by its response's number in the step and by its rank there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.recipe import digest
from stages.groups import Group, Prompt


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Ids that a node evaluates; ``rows`` are the indices into them that are scored, ascending.

    ``targets`` are what the rows predict.
    """

    inputs: tuple[int, ...]
    rows: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens that a rollout samples: response ``response`` of the Value ``rollout``, opened by ``opening_id``."""

    rollout: str
    response: int
    opening_id: int
    max_tokens: int

    def tokens(self, sampled: Sequence[int]) -> Tokens:
        """Return what there is to evaluate once the response's ids are known; all of them are trainable."""
        return Tokens(inputs=(self.opening_id, *sampled[:-1]), rows=tuple(range(len(sampled))), targets=tuple(sampled))


Responses = Mapping[str, Sequence[Sequence[int]]]
"""The ids of the sampled responses, by the name of their rollout Value."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of tokens after a shared prefix, the first at ``first_position``.

    ``response`` is the number within the step of the response whose tokens are scored here.
    """

    name: str
    content: Tokens | Sampled
    first_position: int
    response: int = -1
    children: tuple[Node, ...] = ()

    @property
    def max_inputs(self) -> int:
        """The number of ids evaluated; for sampled ones, at most."""
        return self.content.max_tokens if isinstance(self.content, Sampled) else len(self.content.inputs)

    def max_rows(self, start: int, stop: int) -> int:
        """Return the number of scored rows among inputs ``start`` to ``stop``, at most."""
        if isinstance(self.content, Sampled):
            return min(stop, self.max_inputs) - start
        return bisect_left(self.content.rows, stop) - bisect_left(self.content.rows, start)

    def resolve(self, responses: Responses) -> Tokens:
        """Return the node's tokens, looked up among sampled ``responses`` where they were not known before."""
        if isinstance(self.content, Tokens):
            return self.content
        return self.content.tokens(responses[self.content.rollout][self.content.response])


def group_tree(group: Group, *, name: str, first_response: int = 0) -> Node:
    """Return the trunk of a group with its leaves; ``first_response`` is its first response's number in the step."""
    leaves = []
    for index, response in enumerate(group.responses):
        scored = [position for position, trainable in enumerate(response.mask) if trainable]
        if not scored:
            continue
        tokens = Tokens(
            inputs=(group.prompt_ids[-1], *response.token_ids[: scored[-1]]),
            rows=tuple(scored),
            targets=tuple(response.token_ids[position] for position in scored),
        )
        leaves.append(_leaf(f"{name}/response{index}", tokens, len(group.prompt_ids), first_response + index))
    return _trunk(name, group.trunk_ids, leaves)


def sampled_tree(
    prompt: Prompt, *, name: str, rollout: str, group_size: int, max_tokens: int, first_response: int = 0
) -> Node:
    """Return the trunk of a prompt with one leaf for every response that the Value ``rollout`` will hold."""
    leaves = [
        _leaf(
            f"{name}/response{index}",
            Sampled(rollout=rollout, response=index, opening_id=prompt.token_ids[-1], max_tokens=max_tokens),
            len(prompt.token_ids),
            first_response + index,
        )
        for index in range(group_size)
    ]
    return _trunk(name, prompt.trunk_ids, leaves)


def _leaf(name: str, content: Tokens | Sampled, prompt_tokens: int, response: int) -> Node:
    return Node(name=name, content=content, first_position=prompt_tokens - 1, response=response)


def _trunk(name: str, ids: tuple[int, ...], leaves: Sequence[Node]) -> Node:
    return Node(name=f"{name}/prompt", content=Tokens(inputs=ids), first_position=0, children=tuple(leaves))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one stage evaluates: tokens ``start`` to ``stop`` of one node, or the whole of several sibling leaves.

    Where tokens are sampled, ``stop`` is the last there can be.
    """

    nodes: tuple[Node, ...]
    start: int
    stop: int

    @property
    def max_tokens(self) -> int:
        return self.stop - self.start

    @cached_property
    def max_rows(self) -> int:
        """The number of scored rows, at most."""
        return sum(node.max_rows(self.start, self.stop) for node in self.nodes)

    @cached_property
    def contents(self) -> list[list[object]]:
        """What is evaluated and scored, node by node, as short plain data for recipe keys."""
        return [self._content(node.content) for node in self.nodes]

    def _content(self, content: Tokens | Sampled) -> list[object]:
        if isinstance(content, Sampled):
            return [content.response, content.opening_id, content.max_tokens]
        scored = slice(*(bisect_left(content.rows, edge) for edge in (self.start, self.stop)))
        rows = [list(content.rows[scored]), list(content.targets[scored])]
        return [digest(content.inputs[self.start : self.stop]), digest(rows)]

    @property
    def first_position(self) -> int:
        return self.nodes[0].first_position + self.start

    @cached_property
    def rollouts(self) -> tuple[str, ...]:
        """The rollout Values that the chunk's tokens are looked up in."""
        return tuple(dict.fromkeys(n.content.rollout for n in self.nodes if isinstance(n.content, Sampled)))

    def resolve(self, responses: Responses) -> Batch:
        """Return what is evaluated, with the ids of sampled tokens looked up."""
        return Batch(chunk=self, tokens=tuple(node.resolve(responses) for node in self.nodes))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A chunk whose tokens are known; one branch for every node. It may turn out to be empty."""

    chunk: Chunk
    tokens: tuple[Tokens, ...]

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of the longest branch."""
        longest = max(len(tokens.inputs) for tokens in self.tokens)
        return max(0, min(self.chunk.stop, longest) - self.chunk.start)

    @property
    def padded_ids(self) -> list[list[int]]:
        """Ids per branch, padded on the right with 0 to equal length."""
        rows = [list(tokens.inputs[self.chunk.start : self.chunk.stop]) for tokens in self.tokens]
        return [row + [0] * (self.num_tokens - len(row)) for row in rows]

    def scored(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (row in the flattened batch, target id, response in the step, rank in it) of the scored tokens."""
        for branch, (node, tokens) in enumerate(zip(self.chunk.nodes, self.tokens, strict=True)):
            for rank, (row, target) in enumerate(zip(tokens.rows, tokens.targets, strict=True)):
                if self.chunk.start <= row < self.chunk.stop:
                    yield branch * self.num_tokens + row - self.chunk.start, target, node.response, rank


def chunks_of(nodes: tuple[Node, ...], chunk_tokens: int) -> list[Chunk]:
    """Cut a node into chunks; several nodes are one chunk (a wave) of their longest length."""
    if len(nodes) > 1:
        return [Chunk(nodes=nodes, start=0, stop=max(node.max_inputs for node in nodes))]
    total = nodes[0].max_inputs
    return [
        Chunk(nodes=nodes, start=start, stop=min(start + chunk_tokens, total))
        for start in range(0, total, chunk_tokens)
    ]


def waves_of(children: Sequence[Node], *, chunk_tokens: int, branches_at_once: int) -> list[tuple[Node, ...]]:
    """Group sibling leaves that fit into one chunk each, in order; longer ones and inner nodes go alone."""
    waves: list[list[Node]] = []
    for node in children:
        alone = node.max_inputs > chunk_tokens or bool(node.children)
        last = waves[-1] if waves else []
        if alone or not last or len(last) >= branches_at_once or last[0].max_inputs > chunk_tokens or last[0].children:
            waves.append([node])
        else:
            last.append(node)
    return [tuple(wave) for wave in waves]
