"""What ``engine fit`` prints: a table of what fits, and below it why there is no better."""

from __future__ import annotations

from collections.abc import Sequence

from engine.budget import Budget, Tier
from engine.fit import Fitted
from engine.report import table
from engine.units import format_bytes, format_seconds


def describe_fit(plan: str, budget: Budget, answers: Sequence[Fitted]) -> str:
    """Return the text for a plan's answers within ``budget``."""
    header = ["", "value", "time", *(f"{tier} peak" for tier in Tier)]
    lines = [f"plan {plan}, budget {budget}", table(header, [_row(answer) for answer in answers])]
    return "\n".join([*lines, *map(_reason, answers)])


def _row(answer: Fitted) -> list[str]:
    title = f"smallest {answer.name}" if answer.name in list(Tier) else f"largest {answer.name}"
    if answer.value is None or answer.forecast is None:
        return [title, "nothing fits", "-", *("-" for _ in Tier)]
    value = format_bytes(answer.value) if answer.name in list(Tier) else str(answer.value)
    peaks = [format_bytes(answer.forecast.peak_bytes[tier]) for tier in Tier]
    return [title, value, format_seconds(answer.forecast.makespan_s), *peaks]


def _reason(answer: Fitted) -> str:
    """Return the exact bytes of a tier, the choices, and why there is no better."""
    parts = [answer.limit]
    if answer.forecast is not None and answer.forecast.plan.choices:
        choices = ", ".join(f"{name} {value}" for name, value in answer.forecast.plan.choices.items())
        parts.insert(0, f"with {choices}")
    if answer.name in list(Tier) and answer.value is not None:
        parts.insert(0, f"{answer.value} bytes")
    return f"{answer.name}: {'; '.join(parts)}"
