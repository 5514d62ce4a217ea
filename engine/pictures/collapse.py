"""A graph of any size as one that a person can read: alike stages become one node with a count.

Stages are alike when their kind is the same and their names differ in numbers only. How many of the numbers may differ
is the *level*: first the last one (``tokens0-599``), then all but those of the step, then those of the step too, until
few enough nodes are left. The numbers that differ are written as ``*``.

Invariant: the collapsed graph has no cycle. Joining stages of several steps would make some; an arrow that leads back
to a node which began earlier is left out, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx

from engine.plan import Plan

LEVELS = (1, 2, 3, 4)
_NUMBER = re.compile(r"\d+(?:[-.:]\d+)*")
_STEP = re.compile(r"(?<![^ /])step\d+(?:/epoch\d+)?(?![^ /])")
_EPOCH = re.compile(r"epoch\d+")
OTHERS = "other stages"


@dataclass(frozen=True, kw_only=True)
class Node:
    """Alike stages of a plan: their kind, their names in order, and what they are called together."""

    label: str
    kind: str
    stages: tuple[str, ...]

    @property
    def title(self) -> str:
        """The label, with the number of stages where that is not one."""
        return self.label if len(self.stages) == 1 else f"{self.label} x{len(self.stages)}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A collapsed plan. ``edges`` are pairs of indices into ``nodes``, without those that others imply.

    ``num_back`` arrows would lead back to a node that began earlier.
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    num_back: int = 0
    kinds: tuple[str, ...] = field(default=())

    def graph(self) -> nx.DiGraph[int]:
        """Return the picture as a networkx graph of indices, with ``label`` on each."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        for index, node in enumerate(self.nodes):
            graph.add_node(index, label=node.title)
        graph.add_edges_from(self.edges)
        return graph


def pattern(name: str, level: int) -> str:
    """Return a name with the numbers that may differ at ``level`` as ``*``; see the module."""
    if level <= 0:
        return name
    found = _STEP.search(name)
    step = found.group() if found else ""
    before, after = (name[: found.start()], name[found.end() :]) if found else ("", name)
    if level == 1:
        return before + step + _last_number(after)
    step = _EPOCH.sub("epoch*", step) if level >= 3 else step
    step = _NUMBER.sub("*", step) if level >= 4 else step
    return _NUMBER.sub("*", before) + step + _NUMBER.sub("*", after)


def _last_number(text: str) -> str:
    """Return ``text`` with the numbers of its last component that has any as ``*``."""
    parts = text.split("/")
    for index in reversed(range(len(parts))):
        if _NUMBER.search(parts[index]):
            parts[index] = _NUMBER.sub("*", parts[index])
            break
    return "/".join(parts)


def alike(names: Iterable[str], most_groups: int) -> dict[str, list[str]]:
    """Return names in groups of alike ones, at the lowest level that gives at most ``most_groups``, or the highest."""
    names = list(names)
    groups: dict[str, list[str]] = {}
    for level in LEVELS:
        groups = {}
        for name in names:
            groups.setdefault(pattern(name, level), []).append(name)
        if len(groups) <= most_groups:
            break
    return {key if len(members) > 1 else members[0]: members for key, members in groups.items()}


def _label(key: str, members: list[str], groups: Mapping[str, object]) -> str:
    """Return what a group is called: without a last component that is only a number, unless that is another's name."""
    if len(members) == 1:
        return members[0]
    shorter = re.sub(r"(?<=.)[ /][^ /]*\*$", "", key)
    return shorter if shorter not in groups else key


def collapse(plan: Plan, most_nodes: int, edges: Iterable[tuple[str, str]] | None = None) -> Picture:
    """Return a plan's graph with at most ``most_nodes`` nodes; ``edges`` are the plan's, for who has them already."""
    kind_of = {stage.name: stage.kind for stage in plan.ordered()}
    nodes = [
        Node(label=label, kind=kind, stages=tuple(stages)) for (label, kind), stages in _groups(kind_of, most_nodes)
    ]
    node_of = {stage: index for index, node in enumerate(nodes) for stage in node.stages}
    pairs = {
        (node_of[before], node_of[after]) for before, after in (edges if edges is not None else plan.graph().edges)
    }
    forward = {(before, after) for before, after in pairs if before < after}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from(forward)
    return Picture(
        nodes=tuple(nodes),
        edges=tuple(sorted(nx.transitive_reduction(graph).edges)),
        num_back=sum(before > after for before, after in pairs),
        kinds=tuple(dict.fromkeys(node.kind for node in nodes)),
    )


def _groups(kind_of: Mapping[str, str], most_nodes: int) -> list[tuple[tuple[str, str], list[str]]]:
    """Return stages by what they are called together and their kind, in the order of their first ones."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for level in LEVELS:
        groups: dict[tuple[str, str], list[str]] = {}
        for name, kind in kind_of.items():
            groups.setdefault((pattern(name, level), kind), []).append(name)
        if len(groups) <= most_nodes:
            keys = {key for key, _ in groups}
            return [((_label(key, names, dict.fromkeys(keys)), kind), names) for (key, kind), names in groups.items()]
    for name, kind in kind_of.items():  # names of a plan's own: kinds are all that is left
        key = (kind, kind) if len(by_kind) < most_nodes - 1 or (kind, kind) in by_kind else (OTHERS, OTHERS)
        by_kind.setdefault(key, []).append(name)
    return list(by_kind.items())
