"""What a person reads: forecasts, closing tables, refusals. Plain text, no colours."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import networkx as nx

from engine.budget import Tier
from engine.journal import StageCommit
from engine.own_stage import REPORTED
from engine.pictures.collapse import Picture, alike, collapse
from engine.pictures.terminal import draw_text
from engine.plan import Plan
from engine.planner import Forecast, Offer
from engine.schedule import Copy, Create, filled_tier
from engine.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from engine.runtime import Outcome

_PEAKS = ("planned_peak_bytes", "measured_peak_bytes")

MOST_NODES, MOST_ROWS, MOST_CLOSING_ROWS = 30, 100, 12
"""Of a graph, a table in a terminal, and the stages at the end of a run; what is alike is joined beyond."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, text: Collection[int] = (0,)) -> str:
    """Return rows in columns; those of ``text`` are left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def spilled(forecast: Forecast) -> dict[Tier, int]:
    """Return the bytes that the schedule keeps or puts on host and disk instead of the device, per tier."""
    found = {Tier.HOST: 0, Tier.DISK: 0}
    for item in forecast.schedule.instructions:
        tier = filled_tier(item)
        if isinstance(item, Create | Copy) and tier in found and not forecast.plan.values[item.value].provided:
            found[tier] += forecast.plan.values[item.value].nbytes
    return found


def describe_forecast(forecast: Forecast, offers: Sequence[Offer]) -> str:
    """Return what ``engine simulate`` prints; ``offers`` are what other device budgets would buy."""
    rows = [[str(tier), format_bytes(forecast.budget[tier]), format_bytes(forecast.peak_bytes[tier])] for tier in Tier]
    choices = ", ".join(f"{name} {value}" for name, value in forecast.plan.choices.items())
    lines = [
        *_notes(forecast.plan),
        f"plan {forecast.plan.name}: fits; {len(forecast.schedule.stages)} stages, "
        f"about {format_seconds(forecast.makespan_s)}, bound by {_bound(forecast)}",
        table(["tier", "budget", "predicted peak"], rows),
        f"choices: {choices or 'none'}",
        f"the device peak is reached in stage {forecast.schedule.binding_stage}",
        f"smallest device budget: {format_bytes(forecast.smallest_device_bytes)} "
        f"({forecast.smallest_device_bytes} bytes)",
        _spill_line(forecast),
        *_offer_lines(forecast, offers),
    ]
    return "\n".join(lines)


def _offer_lines(forecast: Forecast, offers: Sequence[Offer]) -> list[str]:
    """Return the table of what device budgets buy, with the choices that differ; nothing where none differs."""
    mine = next((offer for offer in offers if offer.device_bytes == forecast.budget.device_bytes), None)
    if mine is None or len(offers) < 2:
        return []
    rows = [
        [
            format_bytes(offer.device_bytes),
            format_seconds(offer.seconds),
            ", ".join(f"{name} {value}" for name, value in offer.choices.items() if value != mine.choices[name])
            or ("this one" if offer is mine else "same choices"),
        ]
        for offer in offers
    ]
    return ["what other device budgets would buy:", table(["device", "time", "choices"], rows, text=(2,))]


def describe_outcome(forecast: Forecast, outcome: Outcome, run: str, comparison: Mapping[str, object]) -> str:
    """Return the closing text of ``engine execute``."""
    metrics = outcome.results.get("metrics", {})
    figures = {
        "loss": outcome.results.get("loss"),
        "grad norm": outcome.results.get("grad_norm"),
        "mean reward": metrics.get("reward_mean"),
    }
    lines = [
        *([describe_commits(outcome.commits, MOST_CLOSING_ROWS)] if outcome.commits else []),
        _peak_table(forecast, outcome),
        _spill_line(forecast),
        *(f"{name}: {value:.6g}" for name, value in figures.items() if isinstance(value, float)),
        *_reported_lines(outcome.results.get(REPORTED, {})),
        *(str(line) for line in _as_lines(comparison.get("lines"))),
        f"took {format_seconds(outcome.wall_s)}; resident memory of the process at most "
        f"{format_bytes(outcome.rss_bytes)}",
        *([f"checkpoint: {outcome.results['checkpoint']}"] if outcome.results.get("checkpoint") else []),
        f"run: {run} (metrics in results/metrics.jsonl)",
    ]
    return "\n".join(lines)


def _bound(forecast: Forecast) -> str:
    """Say what the time goes into, and how much of the transfers between tiers is waited for."""
    if forecast.transfer_s < 0.01 * forecast.makespan_s:
        return forecast.bound
    return (
        f"{forecast.bound}: {format_seconds(forecast.compute_s)} of arithmetic, transfers between tiers take "
        f"{format_seconds(forecast.transfer_s)} and add {format_seconds(forecast.waited_s)}"
    )


def _peak_table(forecast: Forecast, outcome: Outcome) -> str:
    """Return the peaks per tier; where sizes were planned at their largest, also the prediction at actual ones."""
    actual, measured = outcome.actual_peak_bytes, outcome.measured_peak_bytes
    header = [
        "tier",
        "budget",
        "predicted",
        *(["at actual sizes"] if actual else []),
        "measured",
        "measured / predicted",
    ]
    rows = [
        [
            str(tier),
            format_bytes(forecast.budget[tier]),
            format_bytes(forecast.peak_bytes[tier]),
            *([format_bytes(actual[tier])] if actual else []),
            format_bytes(measured[tier]),
            _ratio(measured[tier], (actual or forecast.peak_bytes)[tier]),
        ]
        for tier in Tier
    ]
    return table(header, rows)


def describe_plan(plan: Plan, *, every: bool = False) -> str:
    """Return what ``engine show PLAN`` prints: the graph, and every stage with its needs and what it waits for.

    In a large plan alike stages are joined to one row, unless ``every`` stage is wanted.
    """
    graph = plan.graph()
    picture = collapse(plan, MOST_NODES, graph.edges)
    lines = [f"plan {plan.name}: {len(plan.stages)} stages, {len(plan.values)} Values", "", draw_text(picture), ""]
    if every or len(plan.stages) <= MOST_ROWS:
        return "\n".join([*lines, _stage_table(plan, graph)])
    return "\n".join([*lines, _node_table(plan, picture), "alike stages are one row; engine show --all lists each"])


def _stage_table(plan: Plan, graph: nx.DiGraph[str]) -> str:
    rows = [
        [
            stage.name,
            format_bytes(stage.workspace_bytes),
            str(sum(len(stream.values) for stream in stage.streams)),
            _waits(list(graph.predecessors(stage.name))),
        ]
        for stage in plan.ordered()
    ]
    return table(["stage", "workspace", "streamed Values", "after"], rows)


def _node_table(plan: Plan, picture: Picture) -> str:
    rows = []
    for index, node in enumerate(picture.nodes):
        stages = [plan.stages[name] for name in node.stages]
        streamed = max(sum(len(stream.values) for stream in stage.streams) for stage in stages)
        workspace = format_bytes(max(stage.workspace_bytes for stage in stages))
        before = [picture.nodes[source].label for source, target in picture.edges if target == index]
        rows.append([node.label, str(len(stages)), workspace, str(streamed), _waits(before)])
    return table(["stages", "how many", "largest workspace", "most streamed Values", "after"], rows)


def _waits(before: Sequence[str]) -> str:
    return (", ".join(before[:2]) + (f" and {len(before) - 2} more" if len(before) > 2 else "")) or "-"


def describe_commits(commits: Sequence[StageCommit], most_rows: int = MOST_ROWS) -> str:
    """Return the stages that a run has finished, alike ones in one row, or nothing where there are none."""
    by_name = {commit.stage: commit for commit in commits}
    rows = []
    for label, names in alike(by_name, most_rows).items():
        mine = [by_name[name] for name in names]
        seconds = f"{sum(item.wall_s for item in mine):.3f}"
        rows.append([label, str(len(mine)), seconds, *(_planned_and_measured(mine, tier) for tier in Tier)])
    header = ["stages", "how many", "seconds", *(f"{tier} planned / measured" for tier in Tier)]
    return table(header, rows) if rows else ""


def _planned_and_measured(commits: Sequence[StageCommit], tier: Tier) -> str:
    """Return the largest planned and the largest measured bytes of some stages on a tier."""
    found = [max(getattr(item, name)[str(tier)] for item in commits) for name in _PEAKS]
    return " / ".join(map(format_bytes, found)) if any(found) else "-"


def describe_audit(report: Mapping[str, object]) -> str:
    """Return what ``engine audit`` prints."""
    stop = report["stop_prompt"]
    assert isinstance(stop, Mapping)
    verdict = "within" if report["passed"] else "OUT OF"
    return "\n".join(
        [
            f"planned gradient against dense autograd, {report['dtype']}:",
            f"  max_rel_err  {report['max_rel_err']:.3e}",
            f"  l2_rel_err   {report['l2_rel_err']:.3e}",
            f"  cosine       {_number(report['cosine'])}",
            f"{verdict} the tolerance of {report['tolerance']:g}",
            f"with the gradient stopped at the prompt: cosine {_number(stop['cosine'])}, "
            f"l2_rel_err {_number(stop['l2_rel_err'])}",
        ]
    )


def _notes(plan: Plan) -> list[str]:
    return [f"note: {note}" for note in plan.notes]


def _spill_line(forecast: Forecast) -> str:
    parts = [f"{format_bytes(nbytes)} to {tier}" for tier, nbytes in spilled(forecast).items() if nbytes]
    return f"spilled: {' and '.join(parts)}" if parts else "spilled: nothing"


def _reported_lines(reported: Mapping[str, object]) -> list[str]:
    """Return a line for everything that stages of a person's own reported."""
    texts = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in reported.items()}
    return [f"{name}: {text}" for name, text in texts.items()]


def _ratio(measured: int, predicted: int) -> str:
    return f"{measured / predicted:.4f}" if predicted else ("1.0000" if measured == 0 else "-")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "none (a gradient is zero)"


def _as_lines(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()
