"""The interactive figures of the report, as plotly's JSON: bytes over time for each tier, and the timeline.

What comes from names is escaped here, since plotly reads text as a kind of HTML. Colours of text and grid are left to
the page, which knows whether it is light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from engine.budget import Tier
from engine.pictures.series import Bar, StepLine, bars, measured_steps, planned_steps, step_line
from engine.trace import Lane, Recording
from engine.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds

LINE_HEIGHT, LANE_HEIGHT, MARGIN_HEIGHT = 230, 34, 90
"""Pixels: of a panel of bytes over time, of a lane, and of titles and axes."""

BUDGET_IN_VIEW = 2.0
# A budget of more than this times the peak would press the curve to the floor; it is written above instead.

BUDGET_COLOUR, PLANNED_COLOUR, MEASURED_COLOUR = "#d62728", "#0072b2", "#e69f00"
UNITS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def bytes_figure(tier: Tier, recordings: Sequence[Recording]) -> tuple[str, bool]:
    """Return the figure of a tier's bytes over time, a panel for each recording, and whether lines were thinned."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(recordings), cols=1, vertical_spacing=0.3 / len(recordings))
    peak = max(recording.peak(tier).live_bytes for recording in recordings)
    scale, unit = next(((scale, unit) for scale, unit in UNITS if peak >= scale), (1, "B"))
    budget = recordings[0].budget[tier]
    thinned = False
    for row, recording in enumerate(recordings, start=1):
        for line, name, colour in _lines(tier, recording):
            thinned |= line.is_thinned
            figure.add_trace(_step_trace(line, name, scale, colour), row=row, col=1)
        figure.add_trace(_peak_mark(tier, recording, scale), row=row, col=1)
        figure.update_xaxes(**_time_axis(recording), row=row, col=1)
        if budget <= BUDGET_IN_VIEW * peak:
            figure.add_hline(y=budget / scale, line={"color": BUDGET_COLOUR, "dash": "dash"}, row=row, col=1)
    figure.update_yaxes(title_text=unit, rangemode="tozero")
    figure.update_layout(height=LINE_HEIGHT * len(recordings) + MARGIN_HEIGHT)
    return _json(figure), thinned


def _time_axis(recording: Recording) -> dict[str, Any]:
    """Return the axis that all figures of a recording share."""
    return {"title_text": f"seconds, {recording.process}", "range": [0, recording.end_s or 1]}


def budget_words(peak: int, budget: int) -> str:
    """Return where the budget is in a tier's figure."""
    place = "dashed" if budget <= BUDGET_IN_VIEW * peak else "above what is drawn"
    return f"the budget of {format_bytes(budget)} is {place}"


def _lines(tier: Tier, recording: Recording) -> Iterable[tuple[StepLine, str, str]]:
    """Yield the lines of a panel with their names and colours: the plan's, and what was measured."""
    before, after = [(0.0, 0)], recording.end_s
    planned = planned_steps(recording.changes[tier])
    yield step_line([*before, *planned, (after, planned[-1][1])]), "planned", PLANNED_COLOUR
    if samples := recording.samples.get(str(tier)):
        measured = measured_steps(samples)
        yield step_line([*before, *measured, (after, measured[-1][1])]), "measured", MEASURED_COLOUR


def _step_trace(line: StepLine, name: str, scale: int, colour: str) -> Any:
    import numpy as np
    import plotly.graph_objects as go

    nbytes = np.asarray(line.nbytes, dtype=np.float64)
    return go.Scatter(
        x=np.asarray(line.seconds, dtype=np.float64),
        y=nbytes / scale,
        customdata=nbytes,
        name=name,
        mode="lines",
        line={"shape": "hv", "width": 1.5, "color": colour},
        hovertemplate=f"%{{x:.6g}} s: %{{customdata:,.0f}} bytes {name}<extra></extra>",
        showlegend=False,
    )


def _peak_mark(tier: Tier, recording: Recording, scale: int) -> Any:
    import plotly.graph_objects as go

    peak = recording.peak(tier)
    return go.Scatter(
        x=[peak.at_s],
        y=[peak.live_bytes / scale],
        customdata=[peak.live_bytes],
        name="peak",
        mode="markers",
        marker={"size": 9, "symbol": "diamond", "color": PLANNED_COLOUR},
        hovertemplate="planned peak, %{customdata:,.0f} bytes<extra></extra>",
        showlegend=False,
    )


def timeline_figure(recordings: Sequence[Recording], colours: dict[str, str]) -> tuple[str, bool]:
    """Return the figure of all lanes, a panel for each recording, and whether stages were joined to fewer bars."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(recordings), cols=1, vertical_spacing=0.3 / len(recordings))
    joined, shown = False, set[str]()
    for row, recording in enumerate(recordings, start=1):
        found = {lane: bars([span for span in recording.spans if span.lane is lane]) for lane in Lane}
        joined |= any(len(bar.spans) > 1 for lane in Lane for bar in found[lane])
        for kind in dict.fromkeys(bar.kind for lane in Lane for bar in found[lane]):
            mine = [(lane, bar) for lane in Lane for bar in found[lane] if bar.kind == kind]
            figure.add_trace(_bar_trace(kind, mine, colours[kind], legend=kind not in shown), row=row, col=1)
            shown.add(kind)
        figure.update_xaxes(**_time_axis(recording), row=row, col=1)
    lanes = [str(lane) for lane in reversed(Lane)]
    figure.update_yaxes(categoryorder="array", categoryarray=lanes, type="category", range=[-0.5, len(lanes) - 0.5])
    height = (len(lanes) * LANE_HEIGHT + MARGIN_HEIGHT) * len(recordings) + MARGIN_HEIGHT
    figure.update_layout(
        barmode="overlay", bargap=0.15, height=height, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    )
    return _json(figure), joined


def _bar_trace(kind: str, mine: Sequence[tuple[Lane, Bar]], colour: str, *, legend: bool) -> Any:
    import numpy as np
    import plotly.graph_objects as go

    return go.Bar(
        orientation="h",
        base=np.asarray([bar.begin_s for _, bar in mine]),
        x=np.asarray([bar.end_s - bar.begin_s for _, bar in mine]),
        y=[str(lane) for lane, _ in mine],
        hovertext=[_hover(bar) for _, bar in mine],
        hovertemplate="%{hovertext}<extra></extra>",
        name=html.escape(kind),
        legendgroup=html.escape(kind),
        showlegend=legend,
        marker={"color": colour, "line": {"width": 0}},
    )


def _hover(bar: Bar) -> str:
    lines = [html.escape(bar.title), format_seconds(bar.end_s - bar.begin_s)]
    if len(bar.spans) == 1:
        span = bar.spans[0]
        lines += [
            f"planned on the {tier}: {format_bytes(nbytes)}" for tier, nbytes in span.planned_bytes.items() if nbytes
        ]
        lines += [
            f"measured on the {tier}: {format_bytes(nbytes)}" for tier, nbytes in (span.measured_bytes or {}).items()
        ]
        lines += [f"{span.route}: {format_bytes(span.moved_bytes)}"] if span.route else []
        lines += [] if span.finished else ["not finished"]
    return "<br>".join(lines)


def _json(figure: Any) -> str:
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 80, "r": 20, "t": 50, "b": 45},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)"},
    )
    text: str = figure.to_json()
    return text
