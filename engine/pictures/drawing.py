"""The plan's graph as SVG inside the report: boxes with names, arrows, and what a node holds when pointed at."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from engine.pictures.collapse import Node, Picture
from engine.pictures.layout import BOX_HEIGHT, BOX_WIDTH, Point, lay_out

COLUMN_PIXELS, ROW_PIXELS, MARGIN = 193, 62, 6

MOST_LETTERS = 23
"""Of the font in use, as fit into a box."""


def draw_svg(picture: Picture, colours: Mapping[str, str], hints: Sequence[str]) -> str:
    """Return the graph as one ``<svg>``; ``hints`` are shown for each node when the mouse rests on it."""
    layout = lay_out(picture)
    width, height = layout.num_columns * COLUMN_PIXELS + 2 * MARGIN, layout.num_rows * ROW_PIXELS + 2 * MARGIN
    arrows = "\n".join(_arrow([_pixels(point) for point in route]) for route in layout.routes)
    boxes = "\n".join(
        _box(node, _pixels(place), colours[node.kind], hint)
        for node, place, hint in zip(picture.nodes, layout.places, hints, strict=True)
    )
    return (
        f'<svg id="graph" role="img" aria-label="the plan as a graph" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="tip"/></marker></defs>\n'
        f"{arrows}\n{boxes}\n</svg>"
    )


def _pixels(point: Point) -> Point:
    return round(point[0] * COLUMN_PIXELS + MARGIN, 1), round(point[1] * ROW_PIXELS + MARGIN, 1)


def _arrow(corners: Sequence[Point]) -> str:
    (x1, y1), (x2, y2) = corners[0], corners[-1]
    if len(corners) == 2:
        middle = (x1 + x2) / 2
        path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
    else:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in corners)
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _box(node: Node, middle: Point, colour: str, hint: str) -> str:
    width, height = BOX_WIDTH * COLUMN_PIXELS, BOX_HEIGHT * ROW_PIXELS
    x, y = middle[0] - width / 2, middle[1] - height / 2
    return (
        f'<g class="node" data-count="{len(node.stages)}"><title>{html.escape(node.title)}\n{html.escape(hint)}</title>'
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" stroke="{colour}"/>'
        f'<text x="{x + 8:g}" y="{y + 16:g}" class="kind">{html.escape(counted_kind(node))}</text>'
        f'<text x="{x + 8:g}" y="{y + 31:g}">{html.escape(short_label(node))}</text></g>'
    )


def counted_kind(node: Node) -> str:
    """Return the first line of a box: the kind, and of how many stages where that is not one."""
    return node.kind if len(node.stages) == 1 else f"{node.kind} x{len(node.stages)}"


def short_label(node: Node) -> str:
    """Return the second line of a box: the name without its kind; the middle of a long one gives way."""
    text = node.label.removeprefix(f"{node.kind} ")
    if len(text) <= MOST_LETTERS:
        return text
    half = (MOST_LETTERS - 1) // 2
    return f"{text[:half]}…{text[-half:]}"
