"""A plan's graph as text."""

from __future__ import annotations

import networkx as nx

from engine.pictures.collapse import Picture


def draw_text(picture: Picture) -> str:
    """Return the graph as a tree of lines; what has other parents than the one above it names them after ``╾``."""
    lines = list(nx.generate_network_text(picture.graph(), vertical_chains=True))
    if picture.num_back:
        lines.append(
            f"({picture.num_back} arrows that lead back, from one of several alike stages to the next, left out)"
        )
    return "\n".join(lines)
