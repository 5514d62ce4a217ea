"""A plan's graph as an image file, drawn by matplotlib."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.pictures.collapse import Picture
from engine.pictures.colours import OUTLINE, colours_of
from engine.pictures.drawing import counted_kind, short_label
from engine.pictures.layout import BOX_HEIGHT, BOX_WIDTH, Layout, lay_out

UNDATED: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The formats, with what keeps the moment out of a file: the same plan gives the same bytes."""
MOST_NODES = 60
"""As many as are still read in one picture."""

COLUMN_INCHES, ROW_INCHES, DOTS_PER_INCH = 2.35, 0.7, 120


def check_image(path: str) -> None:
    """Say before anything slow that an image can't be drawn. Raises UsageError."""
    if Path(path).suffix.lower() not in UNDATED:
        raise UsageError(f"can't draw {path!r}: its name must end in one of {', '.join(UNDATED)}")
    if find_spec("matplotlib") is None:
        raise UsageError("--image needs matplotlib; install it with: pip install 'longstraw[report]'")


def draw_image(picture: Picture, title: str, suffix: str) -> bytes:
    """Return the graph as a file of the format that ``suffix`` names, such as ``.png``."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = lay_out(picture)
    size = (COLUMN_INCHES * layout.num_columns, ROW_INCHES * (layout.num_rows + 1))
    with matplotlib.rc_context({"svg.hashsalt": "plan", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, layout.num_columns), ylim=(layout.num_rows, -1))
        axes.axis("off")
        axes.text(0.09, -0.4, title, fontsize=12)
        _draw(axes, picture, layout)
        file = io.BytesIO()
        kind = suffix.lower()
        figure.savefig(file, format=kind.removeprefix("."), dpi=DOTS_PER_INCH, metadata=UNDATED[kind])
    return file.getvalue()


def _draw(axes: Any, picture: Picture, layout: Layout) -> None:
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
    from matplotlib.path import Path as Line

    colours = colours_of(picture.kinds)
    for route in layout.routes:
        style: dict[str, Any] = {
            "arrowstyle": "-|>",
            "mutation_scale": 9,
            "color": OUTLINE,
            "linewidth": 0.9,
            "joinstyle": "miter",
        }
        axes.add_patch(FancyArrowPatch(path=Line(route), fill=False, **style))
    for node, (x, y) in zip(picture.nodes, layout.places, strict=True):
        left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
        colour = colours[node.kind]
        shape: dict[str, Any] = {
            "boxstyle": "round,pad=0,rounding_size=0.06",
            "facecolor": "white",
            "edgecolor": colour,
        }
        axes.add_patch(FancyBboxPatch((left, top), BOX_WIDTH, BOX_HEIGHT, linewidth=1.4, **shape))
        axes.text(left + 0.04, y - 0.1, counted_kind(node), fontsize=8, weight="bold", color=colour)
        axes.text(left + 0.04, y + 0.18, short_label(node), fontsize=7)
