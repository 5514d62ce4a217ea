"""The report: one HTML file that needs nothing else, about a plan or about a run of it.

It holds the command's JSON object (``<script id="data">``), and every figure that is printed carries the key and the
whole number that it was printed from (``data-key``, ``data-value``), so that report and JSON can be compared. Bytes
over time are exact at their extremes, whatever the size of the plan.

Nothing is loaded: plotly's own code is in the file, and a content security policy forbids everything else. Names come
from users, so all text is escaped, and only the scripts written here may run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from engine.budget import Tier
from engine.errors import UsageError
from engine.pictures.collapse import OTHERS, collapse
from engine.pictures.colours import colours_of
from engine.pictures.drawing import draw_svg
from engine.pictures.figures import budget_words, bytes_figure, timeline_figure
from engine.pictures.series import StageTimes, residents_by_name, stage_times
from engine.planner import Forecast
from engine.trace import Recording
from engine.units import format_bytes, format_seconds

MOST_NODES, MOST_RESIDENTS, MOST_STAGES, MOST_METRICS = 150, 12, 15, 40
"""Rows and nodes that a person still reads."""

STYLE = """
:root { color-scheme: light dark; --faint: rgba(128,128,128,.28); --soft: #767676; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin: 2em 0 .5em; }
table { border-collapse: collapse; margin: .6em 0; } th, td { padding: .22em .9em .22em 0; text-align: left; }
th { font-weight: 600; border-bottom: 1px solid var(--faint); } td.n, th.n { text-align: right; white-space: nowrap; }
td { border-bottom: 1px solid var(--faint); font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
p.about, figcaption { color: var(--soft); } .wide { overflow-x: auto; }
svg#graph .arrow { fill: none; stroke: #808080; stroke-width: 1.2; } svg#graph .tip { fill: #808080; }
svg#graph rect { fill: none; stroke-width: 1.6; } svg#graph text { font-size: 11px; fill: currentColor; }
svg#graph text.kind { font-weight: 600; fill: currentColor; }
.share { display: inline-block; height: .7em; background: #0072b2; border-radius: 2px; }
"""

DRAW = """
(() => {
    const figures = JSON.parse(document.getElementById("figures").textContent);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const coloured = (layout) => {
        const text = getComputedStyle(document.body).color, grid = "rgba(128,128,128,.25)";
        layout.font = { color: text, size: 12 };
        for (const key of Object.keys(layout))
            if (/^[xy]axis/.test(key)) Object.assign(layout[key], { gridcolor: grid, zerolinecolor: grid });
        return layout;
    };
    const config = { responsive: true, displaylogo: false };
    const draw = () => Promise.all(Object.entries(figures).map(([id, figure]) =>
        Plotly.react(id, figure.data, coloured(figure.layout), config)));
    dark.addEventListener("change", draw);
    draw().then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
"""


def check_report_packages() -> None:
    """Say before anything slow that the report can't be made here. Raises UsageError."""
    missing = [name for name in ("plotly",) if find_spec(name) is None]
    if missing:
        raise UsageError(f"--report needs {missing[0]}; install it with: pip install 'longstraw[report]'")


def report_page(data: Mapping[str, Any], forecast: Forecast, measured: Recording | None = None) -> str:
    """Return the report as text: ``data`` is the command's JSON object, ``measured`` the recording of its run."""
    recordings = [forecast.recording] if measured is None else [forecast.recording, measured]
    colours = colours_of([*(stage.kind for stage in forecast.schedule.stages), OTHERS])
    figures: dict[str, str] = {}
    sections = [
        _head(data, forecast),
        _tiers(data),
        _facts(data),
        *(_bytes_section(tier, recordings, figures) for tier in Tier if forecast.peak_bytes[tier]),
        _timeline(recordings, colours, figures),
        *_stages(stage_times(forecast.recording, measured), measured is not None),
        _graph(forecast, stage_times(forecast.recording, measured), colours),
    ]
    return _document(forecast.plan.name, "\n".join(sections), data, figures)


def _document(name: str, body: str, data: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), DRAW]
    drawings = ",".join(f'"{key}":{figure}' for key, figure in figures.items())
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src {' '.join(_script_hash(text) for text in scripts)}"
    )
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(name)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}",
            _json_element("data", json.dumps(data, default=str, allow_nan=False)),
            _json_element("figures", "{" + drawings + "}"),
            *(f"<script>{text}</script>" for text in scripts),
            "</body>\n</html>\n",
        ]
    )


def _script_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_element(name: str, text: str) -> str:
    """Return JSON as a script element that does nothing, whatever strings are in it."""
    inert = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{inert}</script>'


# Words and figures


def _number(data: Mapping[str, Any], key: str, show: Any = format_bytes) -> str:
    """Return a cell that shows one figure of the JSON object and says which; keys are joined by dots."""
    value: Any = data
    for part in key.split("."):
        value = value[part]
    return (
        f'<td class="n" data-key="{html.escape(key)}" data-value="{json.dumps(value)}">{html.escape(show(value))}</td>'
    )


def _table(header: Sequence[str], rows: Iterable[str], name: str = "") -> str:
    """Return a table; ``rows`` are finished cells. Headings after the first are right-aligned."""
    head = "".join(f'<th class="{"n" if i else ""}">{html.escape(text)}</th>' for i, text in enumerate(header))
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table id="{name}">\n<tr>{head}</tr>\n{body}\n</table></div>'


def _cells(*texts: str) -> str:
    return "".join(f'<td class="{"n" if i else ""}">{html.escape(text)}</td>' for i, text in enumerate(texts))


def _head(data: Mapping[str, Any], forecast: Forecast) -> str:
    ran = "wall_s" in data
    kind = "a run, measured beside predicted" if ran else "a simulation: nothing was run"
    run = f"<br>run: {html.escape(str(data['run']))}" if data.get("run") else ""
    notes = "".join(f"<p>note: {html.escape(str(note))}</p>" for note in data.get("notes", ()))
    return (
        f"<h1>{html.escape(forecast.plan.name)}</h1>\n"
        f'<p class="about">{kind}; {len(forecast.schedule.stages)} stages{run}</p>\n{notes}'
    )


def _tiers(data: Mapping[str, Any]) -> str:
    ran, at_actual_sizes = "measured_peak_bytes" in data, "actual_peak_bytes" in data
    expected = "actual_peak_bytes" if at_actual_sizes else "peak_bytes"
    rows = []
    for tier in map(str, Tier):
        row = _cells(tier) + _number(data, f"budget_bytes.{tier}") + _number(data, f"peak_bytes.{tier}")
        if at_actual_sizes:
            row += _number(data, f"actual_peak_bytes.{tier}")
        if ran:
            measured, predicted = data["measured_peak_bytes"][tier], data[expected][tier]
            ratio = f"{measured / predicted:.4f}" if predicted else "-"
            row += _number(data, f"measured_peak_bytes.{tier}") + f'<td class="n">{ratio}</td>'
        rows.append(row)
    header = [
        "tier",
        "budget",
        "predicted peak",
        *(["at actual sizes"] if at_actual_sizes else []),
        *(["measured peak", "measured / predicted"] if ran else []),
    ]
    return f"<h2>Bytes</h2>\n{_table(header, rows, 'tiers')}"


def _facts(data: Mapping[str, Any]) -> str:
    rows = [_cells("predicted time") + _number(data, "makespan_s", format_seconds)]
    if "wall_s" in data:
        rows.append(_cells("measured time") + _number(data, "wall_s", format_seconds))
    rows.append(_cells("smallest device budget") + _number(data, "smallest_device_bytes"))
    rows.append(_cells("stages") + _number(data, "num_stages", str))
    rows += [_cells(f"moved {route}") + _number(data, f"moved_bytes.{route}") for route in data["moved_bytes"]]
    rows.append(_cells("device peak in stage", str(data["binding_stage"])))
    rows += [_cells(f"choice {name}", str(value)) for name, value in data["choices"].items()]
    results = {name: data.get(name) for name in ("loss", "grad_norm")} | dict(data.get("metrics") or {})
    plain = [(name, value) for name, value in results.items() if isinstance(value, int | float | str)]
    rows += [_cells(name, _plain_number(value)) for name, value in plain[:MOST_METRICS]]
    return f"<h2>Figures</h2>\n{_table(['', ''], rows, 'facts')}"


def _plain_number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# Figures


def _bytes_section(tier: Tier, recordings: Sequence[Recording], figures: dict[str, str]) -> str:
    figures[f"bytes-{tier}"], thinned = bytes_figure(tier, recordings)
    peak = recordings[0].peak(tier)
    rows = [
        _cells(name, str(count), format_bytes(nbytes), f"{nbytes / peak.live_bytes:.1%}")
        + f'<td><span class="share" style="width:{round(120 * nbytes / peak.live_bytes)}px"></span></td>'
        for name, count, nbytes in residents_by_name(peak.residents, MOST_RESIDENTS)
    ]
    words = budget_words(peak.live_bytes, recordings[0].budget[tier])
    if any(recording.samples.get(str(tier)) for recording in recordings):
        words += ". Orange: each stage's measured peak, and what was live after it"
    about = (
        "Lines have more steps than can be drawn: of each interval the first, lowest, highest and last are kept, "
        "so peaks are exact."
        if thinned
        else ""
    )
    return (
        f'<h2>{str(tier).capitalize()} over time</h2>\n<div id="bytes-{tier}"></div>\n'
        f'<p class="about">Blue: what the ledger counts, the planned bytes; {words}. {about}</p>\n'
        f"<p>At the predicted peak ({format_seconds(peak.at_s)} after the start) there are:</p>\n"
        + _table(["what", "how many", "bytes", "share", ""], rows, f"residents-{tier}")
    )


def _timeline(recordings: Sequence[Recording], colours: dict[str, str], figures: dict[str, str]) -> str:
    figures["timeline"], joined = timeline_figure(recordings, colours)
    about = "Neighbours are joined to one bar where there are too many stages to draw; the trace has each of them. "
    return (
        f'<h2>Timeline</h2>\n<div id="timeline"></div>\n<p class="about">{about if joined else ""}'
        "Drag to zoom, double-click to see all. What a stage streams through its buffers is part of its own bar.</p>"
    )


def _stages(stages: Sequence[StageTimes], ran: bool) -> list[str]:
    slowest = sorted(stages, key=lambda item: -item.seconds)[:MOST_STAGES]
    kinds: dict[str, list[StageTimes]] = {}
    for item in stages:
        kinds.setdefault(item.predicted.kind, []).append(item)
    rows = [_cells(item.predicted.name, *_figures_of([item], ran)) for item in slowest]
    totals = [_cells(kind, str(len(items)), *_figures_of(items, ran)) for kind, items in kinds.items()]
    header = [
        "predicted time",
        *(["measured time"] if ran else []),
        "planned on the device",
        *(["measured"] if ran else []),
    ]
    order = "measured" if ran else "predicted"
    return [
        f"<h2>Slowest stages</h2>\n<p class='about'>by {order} time</p>\n{_table(['stage', *header], rows, 'slowest')}",
        f"<h2>Kinds of stages</h2>\n<p class='about'>times are sums, bytes the largest</p>\n"
        f"{_table(['kind', 'how many', *header], totals, 'kinds')}",
    ]


def _figures_of(items: Sequence[StageTimes], ran: bool) -> list[str]:
    """Return the predicted and measured seconds (sums) and device bytes (largest) of some stages, as text."""
    measured = [item.measured for item in items if item.measured is not None]
    peaks = [span.measured_bytes[Tier.DEVICE] for span in measured if span.measured_bytes is not None]
    planned = max(item.predicted.planned_bytes[Tier.DEVICE] for item in items)
    return [
        _seconds(sum(item.predicted.seconds for item in items)),
        *([_seconds(sum(span.seconds for span in measured)) if measured else "-"] if ran else []),
        format_bytes(planned),
        *([format_bytes(max(peaks)) if peaks else "-"] if ran else []),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else format_seconds(seconds)


def _graph(forecast: Forecast, stages: Sequence[StageTimes], colours: Mapping[str, str]) -> str:
    picture = collapse(forecast.plan, MOST_NODES)
    by_name = {item.predicted.name: item for item in stages}
    hints = [_hint([by_name[name] for name in node.stages]) for node in picture.nodes]
    words = ["Alike stages are one box."] if any(len(node.stages) > 1 for node in picture.nodes) else []
    words.append("An arrow means: must run before; those that others imply are left out.")
    if picture.num_back:
        words.append(f"{picture.num_back} arrows that lead back to a box of an earlier step are left out.")
    words.append("Rest the mouse on a box for its figures.")
    drawing = draw_svg(picture, colours, hints)
    return f'<h2>Plan</h2>\n<p class="about">{" ".join(words)}</p>\n<div class="wide">{drawing}</div>'


def _hint(items: Sequence[StageTimes]) -> str:
    ran = any(item.measured is not None for item in items)
    words = ["predicted", *(["measured"] if ran else []), "planned on the device", *(["measured there"] if ran else [])]
    return "\n".join(f"{word}: {figure}" for word, figure in zip(words, _figures_of(items, ran), strict=True))
