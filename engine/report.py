"""What a person reads: forecasts, closing tables, refusals. Plain text, no colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.budget import Tier
from engine.plan import Plan
from engine.planner import Forecast
from engine.runtime import Outcome
from engine.schedule import Create, Move
from engine.units import format_bytes, format_seconds


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, the first left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def spilled(forecast: Forecast) -> dict[Tier, int]:
    """Return the bytes that the schedule keeps or puts on host and disk instead of the device, per tier."""
    found = {Tier.HOST: 0, Tier.DISK: 0}
    for item in forecast.schedule.instructions:
        value = getattr(item, "value", None)
        tier = item.tier if isinstance(item, Create) else item.target if isinstance(item, Move) else None
        if tier in found and value is not None and not forecast.plan.values[value].provided:
            found[tier] += forecast.plan.values[value].nbytes
    return found


def describe_forecast(forecast: Forecast) -> str:
    """Return what ``engine simulate`` prints."""
    rows = [[str(tier), format_bytes(forecast.budget[tier]), format_bytes(forecast.peak_bytes[tier])] for tier in Tier]
    choices = ", ".join(f"{name} {value}" for name, value in forecast.plan.choices.items())
    lines = [
        *_notes(forecast.plan),
        f"plan {forecast.plan.name}: fits; {len(forecast.schedule.stages)} stages, "
        f"about {format_seconds(forecast.makespan_s)}",
        table(["tier", "budget", "predicted peak"], rows),
        f"choices: {choices or 'none'}",
        f"the device peak is reached in stage {forecast.schedule.binding_stage}",
        f"smallest device budget: {format_bytes(forecast.smallest_device_bytes)} "
        f"({forecast.smallest_device_bytes} bytes)",
        _spill_line(forecast),
    ]
    return "\n".join(lines)


def describe_outcome(forecast: Forecast, outcome: Outcome, run: str, comparison: Mapping[str, object]) -> str:
    """Return the closing text of ``engine execute``."""
    rows = [
        [
            str(tier),
            format_bytes(forecast.budget[tier]),
            format_bytes(forecast.peak_bytes[tier]),
            format_bytes(outcome.measured_peak_bytes[tier]),
            _ratio(outcome.measured_peak_bytes[tier], forecast.peak_bytes[tier]),
        ]
        for tier in Tier
    ]
    figures = {"loss": outcome.results.get("loss"), "grad norm": outcome.results.get("grad_norm")}
    lines = [
        table(["tier", "budget", "predicted", "measured", "measured / predicted"], rows),
        _spill_line(forecast),
        *(f"{name}: {value:.6g}" for name, value in figures.items() if isinstance(value, float)),
        *(str(line) for line in _as_lines(comparison.get("lines"))),
        f"took {format_seconds(outcome.wall_s)}; resident memory of the process at most "
        f"{format_bytes(outcome.rss_bytes)}",
        *([f"checkpoint: {outcome.results['checkpoint']}"] if outcome.results.get("checkpoint") else []),
        f"run: {run} (metrics in results/metrics.jsonl)",
    ]
    return "\n".join(lines)


def describe_plan(plan: Plan) -> str:
    """Return what ``engine show PLAN`` prints: every stage with its needs and what it waits for."""
    graph = plan.graph()
    rows = []
    for stage in plan.ordered():
        before = list(graph.predecessors(stage.name))
        waits = ", ".join(before[:2]) + (f" and {len(before) - 2} more" if len(before) > 2 else "")
        streamed = sum(len(stream.values) for stream in stage.streams)
        rows.append([stage.name, format_bytes(stage.workspace_bytes), str(streamed), waits or "-"])
    header = ["stage", "workspace", "streamed Values", "after"]
    return "\n".join([f"plan {plan.name}: {len(plan.stages)} stages, {len(plan.values)} Values", table(header, rows)])


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


def _ratio(measured: int, predicted: int) -> str:
    return f"{measured / predicted:.4f}" if predicted else ("1.0000" if measured == 0 else "-")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "none (a gradient is zero)"


def _as_lines(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()
