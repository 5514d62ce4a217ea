"""The token tree of a step: tokens arranged by shared prefix.

A group is a trunk (the prompt without its last token) with one leaf per response. The last prompt token opens every
leaf, so prompt rows never meet the head; a leaf's inputs are that token and the response without its last one, and
each input row predicts the next token. Leaves end at their last trainable token: what comes after it is never
scored and nobody sees it. A leaf without trainable tokens is left out (it still counts in the loss), and a group
without leaves needs no evaluation.

Invariant: ``rows`` of all leaves, in the order of groups, responses and positions, are the trainable tokens of the
step in canonical order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.groups import Group


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of tokens after a shared prefix.

    ``inputs`` are the ids evaluated, the first at ``first_position``; ``rows`` are the indices into them that are
    scored, ``targets`` the ids they predict, and ``order`` their places in the canonical order of the step.
    """

    name: str
    inputs: tuple[int, ...]
    first_position: int
    rows: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    children: tuple[Node, ...] = ()


def group_tree(group: Group, *, name: str, first_row: int) -> Node:
    """Return the trunk of a group with its leaves; ``first_row`` is its first place in the canonical order."""
    leaves, row = [], first_row
    for index, response in enumerate(group.responses):
        scored = [position for position, trainable in enumerate(response.mask) if trainable]
        if not scored:
            continue
        inputs = (group.prompt_ids[-1], *response.token_ids[: scored[-1]])
        leaves.append(
            Node(
                name=f"{name}/response{index}",
                inputs=inputs,
                first_position=len(group.prompt_ids) - 1,
                rows=tuple(scored),
                targets=tuple(response.token_ids[position] for position in scored),
                order=tuple(range(row, row + len(scored))),
            )
        )
        row += len(scored)
    return Node(name=f"{name}/prompt", inputs=group.prompt_ids[:-1], first_position=0, children=tuple(leaves))


def step_trees(groups: Sequence[Group]) -> list[Node]:
    """Return the trees of all groups that have something to train on, longest prompt first."""
    trees, row = [], 0
    for index, group in enumerate(groups):
        tree = group_tree(group, name=f"group{index}", first_row=row)
        row += sum(len(leaf.rows) for leaf in tree.children)
        if tree.children:
            trees.append(tree)
    return sorted(trees, key=lambda tree: -len(tree.inputs))


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one stage evaluates: tokens ``start`` to ``stop`` of one node, or the whole of several sibling leaves."""

    nodes: tuple[Node, ...]
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def first_position(self) -> int:
        return self.nodes[0].first_position + self.start

    @property
    def padded_ids(self) -> list[list[int]]:
        """Ids per branch, padded on the right with 0 to equal length."""
        rows = [list(node.inputs[self.start : self.stop]) for node in self.nodes]
        return [row + [0] * (self.tokens - len(row)) for row in rows]

    def scored(self) -> Iterator[tuple[int, int, int]]:
        """Yield (row in the flattened batch, target id, place in the canonical order) of the scored tokens."""
        for branch, node in enumerate(self.nodes):
            for row, target, place in zip(node.rows, node.targets, node.order, strict=True):
                if self.start <= row < self.stop:
                    yield branch * self.tokens + row - self.start, target, place


def chunks_of(nodes: tuple[Node, ...], chunk_tokens: int) -> list[Chunk]:
    """Cut a node into chunks; several nodes are one chunk (a wave) of their longest length."""
    if len(nodes) > 1:
        return [Chunk(nodes=nodes, start=0, stop=max(len(node.inputs) for node in nodes))]
    total = len(nodes[0].inputs)
    return [
        Chunk(nodes=nodes, start=start, stop=min(start + chunk_tokens, total))
        for start in range(0, total, chunk_tokens)
    ]


def waves_of(children: Sequence[Node], *, chunk_tokens: int, branches_at_once: int) -> list[tuple[Node, ...]]:
    """Group sibling leaves that fit into one chunk each, in order; longer ones and inner nodes go alone."""
    waves: list[list[Node]] = []
    for node in children:
        alone = len(node.inputs) > chunk_tokens or bool(node.children)
        last = waves[-1] if waves else []
        if alone or not last or len(last) >= branches_at_once or len(last[0].inputs) > chunk_tokens or last[0].children:
            waves.append([node])
        else:
            last.append(node)
    return [tuple(wave) for wave in waves]
