"""Operators that a chunk's stage issues beside its model's: on a CPU, and in short chunks, they are what takes time.

`models.geometry` counts what evaluating a chunk takes. A stage also looks up every piece of state that it reads, writes
its own state page by page, reads the cotangents of that, and keeps layers' inputs for the backward. Several branches
are folded into one where they attend to a page, and apart again. The numbers were counted on real stages;
`tests/unit/test_operators.py` counts again. What pieces off the device take beyond that is part of their price.
"""

from __future__ import annotations

from engine.plan import Cost
from stages.spans import Span
from stages.tree import Chunk

_A_PAGE, _BACKWARD_A_PAGE = 1, 4
# Of the prefix, a layer: its piece is looked up; in the backward, that of its cotangents is changed.
_BRANCHES, _BRANCHES_A_PAGE = 2, 4
_BACKWARD_BRANCHES, _BACKWARD_BRANCHES_A_PAGE = 9, 2
# The same where there are several branches.
_OWN, _AN_OWN_PAGE = -4, 13
_BACKWARD_OWN, _BACKWARD_AN_OWN_PAGE = 1, 12
# A layer's own state is written page by page (a few operators fewer than pages: `models.geometry` has counted them);
# its cotangents are read page by page.
_INPUTS, _INPUTS_A_BRANCH, _BACKWARD_INPUTS = 2, 3, 2
_ATTENTION, _ATTENTION_A_BRANCH, _BACKWARD_ATTENTION = 7, 6, 6
# Of what a layer keeps: inputs, and also what attention gave.
_EDGES, _BACKWARD_EDGES = 26, 22
# Of a recurrent layer: boundaries are read and written, and so are their cotangents.
_ROWS, _BACKWARD_ROWS = 9, 31
# Rows are picked for the head, and its results go where they belong.


def forward_operators(chunk: Chunk, span: Span, *, pages: float, own_pages: float, kept: int) -> Cost:
    """Return the cost of what the forward of a chunk does beside evaluating it.

    The prefix lies in ``pages`` pages, the state that it keeps in ``own_pages``; ``kept`` is the level of what it keeps
    for its backward (`stages.kept`).
    """
    branches, found = len(chunk.nodes), _to_prefix(chunk, pages)
    if kept:
        found += _INPUTS + _INPUTS_A_BRANCH * branches
    if kept > 1:
        found += _ATTENTION + _ATTENTION_A_BRANCH * branches
    own = _OWN + _AN_OWN_PAGE * own_pages if own_pages else 0.0
    return _whole(chunk, span, attention=found, state=own, edges=_EDGES, rows=_ROWS)


def backward_operators(chunk: Chunk, span: Span, *, pages: float, own_pages: float, kept: int) -> Cost:
    """Return the cost of what the backward of a chunk does beside evaluating it, forwards that it repeats included."""
    found = _BACKWARD_A_PAGE * pages + max(0, 2 - kept) * _to_prefix(chunk, pages)
    if pages and len(chunk.nodes) > 1:
        found += _BACKWARD_BRANCHES + _BACKWARD_BRANCHES_A_PAGE * pages
    if kept:
        found += _BACKWARD_INPUTS
    if kept > 1:
        found += _BACKWARD_ATTENTION
    own = _BACKWARD_OWN + _BACKWARD_AN_OWN_PAGE * own_pages if own_pages else 0.0
    return _whole(chunk, span, attention=found, state=own, edges=_BACKWARD_EDGES, rows=_BACKWARD_ROWS)


def _to_prefix(chunk: Chunk, pages: float) -> float:
    """Return the operators of a layer's attention to the prefix."""
    several = _BRANCHES + _BRANCHES_A_PAGE * pages if pages and len(chunk.nodes) > 1 else 0.0
    return _A_PAGE * pages + several


def _whole(chunk: Chunk, span: Span, *, attention: float, state: float, edges: int, rows: int) -> Cost:
    """Add up over layers; where no row is scored, the model's last one stops at its state.

    ``attention`` is what one with attention does beside what it does for its own ``state``, ``edges`` what a recurrent
    one does for its boundaries.
    """
    layers, scored = len(span.attention_rows), span.is_last and bool(chunk.max_rows)
    whole = layers - (span.is_last and not scored and span.layers[-1] in span.attention_rows)
    others = len(span.recurrent) * edges
    return Cost(num_kernels=whole * attention + layers * state + others + (rows if scored else 0))
