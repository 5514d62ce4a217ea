"""Curves and bars small enough to draw, with nothing lost that matters.

Bytes over time are a step line with an extreme at every peak. Where it has too many steps, time is cut into equal
intervals and each keeps its first, lowest, highest and last step: peaks and their moments stay exact. Stages next to
each other on a lane become one bar where there are too many of them. Callers say so where either happened.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.pictures.collapse import alike
from engine.trace import Change, Recording, Sample, Span

MOST_STEPS = 4000
"""Steps of one line: about two for each pixel of a wide screen."""

MOST_BARS = 1500
"""Bars of one lane. Browsers draw some thousands of shapes without delay."""

STEPS_AN_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """Bytes from each moment on, in order; ``num_steps`` are those it was drawn from."""

    seconds: Sequence[float]
    nbytes: Sequence[int]
    num_steps: int

    @property
    def is_thinned(self) -> bool:
        return len(self.seconds) < self.num_steps


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One span, or several next to each other on a lane, of the kind that took most of the time."""

    kind: str
    begin_s: float
    end_s: float
    spans: Sequence[Span]

    @property
    def title(self) -> str:
        return self.spans[0].name if len(self.spans) == 1 else f"{len(self.spans)} in a row, most time in {self.kind}"


def step_line(steps: Sequence[tuple[float, int]], most: int = MOST_STEPS) -> StepLine:
    """Return ``(moment, bytes)`` steps in the order of time, at most ``most`` of them."""
    kept = steps if len(steps) <= most else _thinned(steps, most // STEPS_AN_INTERVAL)
    return StepLine(seconds=[at for at, _ in kept], nbytes=[nbytes for _, nbytes in kept], num_steps=len(steps))


def _thinned(steps: Sequence[tuple[float, int]], num_intervals: int) -> list[tuple[float, int]]:
    begin, end = steps[0][0], steps[-1][0]
    moments = [at for at, _ in steps]
    edges = [bisect.bisect_left(moments, begin + (end - begin) * i / num_intervals) for i in range(1, num_intervals)]
    kept: list[tuple[float, int]] = []
    for start, stop in zip([0, *edges], [*edges, len(steps)], strict=True):
        if start < stop:
            inside = range(start, stop)
            lowest, highest = (pick(inside, key=lambda i: steps[i][1]) for pick in (min, max))
            kept += [steps[index] for index in sorted({start, lowest, highest, stop - 1})]
    return kept


def planned_steps(changes: Sequence[Change]) -> list[tuple[float, int]]:
    """Return the ledger's bytes after each change."""
    return [(change.at_s, change.live_bytes) for change in changes]


def measured_steps(samples: Sequence[Sample]) -> list[tuple[float, int]]:
    """Return each stage's measured peak while it ran, and what was live after it."""
    return [
        step for sample in samples for step in ((sample.begin_s, sample.peak_bytes), (sample.end_s, sample.live_bytes))
    ]


def bars(spans: Sequence[Span], most: int = MOST_BARS) -> list[Bar]:
    """Return the spans of one lane as at most ``most`` bars, in order."""
    runs = [[span] for span in spans]
    if len(runs) > most:
        runs = _runs_of_one_kind(spans)
    if len(runs) > most:
        size = -(-len(runs) // most)
        runs = [list(itertools.chain(*runs[start : start + size])) for start in range(0, len(runs), size)]
    return [_bar(run) for run in runs]


def _runs_of_one_kind(spans: Sequence[Span]) -> list[list[Span]]:
    runs: list[list[Span]] = []
    for span in spans:
        if runs and runs[-1][-1].kind == span.kind:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _bar(spans: list[Span]) -> Bar:
    seconds: Counter[str] = Counter()
    for span in spans:
        seconds[span.kind] += span.seconds  # type: ignore[assignment]  # a Counter adds floats as well
    kind = max(seconds, key=lambda item: seconds[item])
    return Bar(kind=kind, begin_s=spans[0].begin_s, end_s=spans[-1].end_s, spans=spans)


def residents_by_name(residents: Mapping[str, int], most: int) -> list[tuple[str, int, int]]:
    """Return the residents of a peak as ``(name, how many, bytes)``, largest first, alike ones joined.

    At most ``most`` rows; the last one joins what is smaller then.
    """
    groups = alike(residents, most)
    rows = [(label, len(names), sum(residents[name] for name in names)) for label, names in groups.items()]
    rows.sort(key=lambda row: (-row[2], row[0]))
    if len(rows) <= most:
        return rows
    rest = rows[most - 1 :]
    return [*rows[: most - 1], (f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest))]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One stage, predicted and (where it ran) measured."""

    predicted: Span
    measured: Span | None

    @property
    def seconds(self) -> float:
        return (self.measured or self.predicted).seconds


def stage_times(predicted: Recording, measured: Recording | None) -> list[StageTimes]:
    """Return every stage of the plan in order; those that did not run have no measured span."""
    ran = measured.stages() if measured is not None else {}
    return [StageTimes(predicted=span, measured=ran.get(name)) for name, span in predicted.stages().items()]
