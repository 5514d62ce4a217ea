"""Places for the nodes of a collapsed graph: layers from left to right, wrapped like lines of text.

A node's layer is the length of the longest path that leads to it. Inside a layer nodes are ordered by where what they
wait for stands, which keeps arrows from crossing. Places are in columns and rows, counted from the top left; a box
takes a share of its cell, and the rest is for arrows. Pure arithmetic, so that the image and the report agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from engine.pictures.collapse import Picture

LAYERS_A_LINE = 6
# As many boxes with a stage's name in them as fit side by side on a screen.
BOX_WIDTH, BOX_HEIGHT = 0.82, 0.64
# The share of its cell that a box takes.
SWEEPS = 4
# Orderings settle after a few passes in each direction.

Layers = list[list[int]]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The middle of each node's box, and the corners of each edge's arrow, in columns and rows."""

    places: tuple[Point, ...]
    routes: tuple[tuple[Point, ...], ...]
    num_columns: int
    num_rows: int


def lay_out(picture: Picture) -> Layout:
    """Return places for the nodes of ``picture`` and routes for its edges."""
    graph = picture.graph()
    layers = _ordered(graph, [sorted(layer) for layer in nx.topological_generations(graph)])
    places: dict[int, Point] = {}
    tops: dict[int, int] = {}
    top = 0
    for start in range(0, len(layers), LAYERS_A_LINE):
        line = layers[start : start + LAYERS_A_LINE]
        height = max(len(layer) for layer in line)
        for column, layer in enumerate(line):
            for row, node in enumerate(layer):
                places[node] = (column + 0.5, top + row + (height - len(layer)) / 2 + 0.5)
                tops[node] = top
        top += height
    return Layout(
        places=tuple(places[index] for index in range(len(picture.nodes))),
        routes=tuple(_route(places[before], places[after], tops[after]) for before, after in picture.edges),
        num_columns=min(len(layers), LAYERS_A_LINE),
        num_rows=top,
    )


def _route(before: Point, after: Point, top: int) -> tuple[Point, ...]:
    """Return the corners of an arrow: straight on, or between the lines where it leads to a later one."""
    start, end = (before[0] + BOX_WIDTH / 2, before[1]), (after[0] - BOX_WIDTH / 2, after[1])
    if end[0] > start[0]:
        return (start, end)
    right, left = start[0] + (1 - BOX_WIDTH) / 2, end[0] - (1 - BOX_WIDTH) / 2
    return (start, (right, start[1]), (right, float(top)), (left, float(top)), (left, end[1]), end)


def _ordered(graph: nx.DiGraph[int], layers: Layers) -> Layers:
    """Order each layer by the mean place of its neighbours, forwards and backwards in turn."""
    for sweep in range(SWEEPS):
        place = {node: index / len(layer) for layer in layers for index, node in enumerate(layer)}
        forwards = sweep % 2 == 0
        for layer in layers if forwards else reversed(layers):
            mean = {node: _mean(graph, node, place, forwards=forwards) for node in layer}
            layer.sort(key=lambda node: (mean[node], node))
            place.update({node: index / len(layer) for index, node in enumerate(layer)})
    return layers


def _mean(graph: nx.DiGraph[int], node: int, place: dict[int, float], *, forwards: bool) -> float:
    near = list(graph.predecessors(node) if forwards else graph.successors(node))
    return sum(place[item] for item in near) / len(near) if near else place[node]
