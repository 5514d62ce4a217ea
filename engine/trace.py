"""What happened when, as a worker was fed its schedule: spans, and bytes live per tier.

A `Recording` is told by the driver of every instruction, and by the ledger of every byte that it counts, so its
counters are the ledger's own figures. Simulated and real machines are recorded by the same code with another clock:
the recordings of one schedule have the same spans in the same order, with the same planned bytes, and lie over each
other.

Nouns: a *span* is a stage or a copy, on one of three lanes: the worker's stages, copies between device and host, and
whatever goes to the disk or comes from it. Copies that run alongside a stage share its time by their bytes. A *change*
is one entry that the ledger added or removed. What came of a peak (the residents) is computed from the changes when it
is asked for.

Invariant: spans of one lane do not overlap, and changes are in the order of time. This module is pure: the clock is
given, and nothing is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.budget import Budget, Tier
from engine.plan import Plan
from engine.schedule import Copy, Instruction, Run

TICKS_PER_S = 8_000_000
# Times in a trace are multiples of an eighth of a microsecond: exact as binary fractions of a microsecond, and whole
# nanoseconds, so no reader's rounding can make two spans overlap.
_TICKS_PER_US = 8

PREDICTED, MEASURED = "predicted", "measured"
"""Whose times a recording has: the simulator's or a real machine's."""

Measured = Mapping[str, int]
"""Measured bytes by the name of a tier."""


class Lane(StrEnum):
    """Where a span is drawn."""

    WORKER = "worker 0"
    COPIES = "copies"
    DISK = "disk"


class Change(NamedTuple):
    """An entry that the ledger added to a tier or removed from it, and the bytes live there afterwards."""

    at_s: float
    entry: str
    nbytes: int
    live_bytes: int


class Sample(NamedTuple):
    """Measured bytes of a stage: its peak from ``begin_s`` on, what was live from ``end_s`` on."""

    begin_s: float
    end_s: float
    peak_bytes: int
    live_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stage or a copy. ``planned_bytes`` are those live per tier while it lasts, ``measured_bytes`` its peaks.

    ``moved_bytes`` go over the route ``source->target``; a stage has none (``streamed_bytes`` pass through its
    buffers). ``finished`` is false for what failed or was interrupted.
    """

    lane: Lane
    name: str
    kind: str
    begin_s: float
    end_s: float
    planned_bytes: Mapping[Tier, int]
    measured_bytes: Measured | None = None
    moved_bytes: int = 0
    route: str = ""
    streamed_bytes: int = 0
    finished: bool = True

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    def arguments(self) -> dict[str, object]:
        """Return what a trace says of the span when it is selected."""
        found: dict[str, object] = {"kind": self.kind}
        if self.route:
            found |= {"route": self.route, "bytes": self.moved_bytes}
        if self.streamed_bytes:
            found["streamed_bytes"] = self.streamed_bytes
        found |= {f"planned_{tier}_bytes": nbytes for tier, nbytes in self.planned_bytes.items()}
        found |= {f"measured_{tier}_bytes": nbytes for tier, nbytes in (self.measured_bytes or {}).items()}
        return found if self.finished else {**found, "unfinished": True}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which a tier held the most bytes, and what they were, by entry."""

    at_s: float
    live_bytes: int
    residents: Mapping[str, int]


class Recording:
    """Listens to the driver and the ledger; see the module. ``process`` says whose times these are.

    Life cycle: made before the driver starts, told of everything, closed once. A recording that was closed while an
    instruction was under way keeps it as an unfinished span.
    """

    def __init__(self, plan: Plan, budget: Budget, *, process: str, clock: Callable[[], float]) -> None:
        self.plan, self.budget, self.process = plan, budget, process
        self.spans: list[Span] = []
        self.changes: dict[Tier, list[Change]] = {tier: [] for tier in Tier}
        self.samples: dict[str, list[Sample]] = {}
        self._clock = clock
        self._live: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._alongside: list[tuple[Copy, dict[Tier, int]]] = []
        self._open: tuple[Instruction, float, dict[Tier, int]] | None = None
        self._measured: tuple[Measured, Measured] | None = None

    # What the driver and the ledger say

    def changed(self, tier: Tier, entry: str, nbytes: int, live_bytes: int) -> None:
        """The ledger added ``nbytes`` for an entry (removed them, if negative), and has ``live_bytes`` now."""
        self._live[tier] = live_bytes
        self.changes[tier].append(Change(self._clock(), entry, nbytes, live_bytes))

    def begins(self, instruction: Instruction) -> None:
        """An instruction is about to be carried out; the ledger has counted what it adds."""
        if isinstance(instruction, Copy) and instruction.alongside:
            self._alongside.append((instruction, dict(self._live)))
        elif isinstance(instruction, Run | Copy):
            self._open = (instruction, self._clock(), dict(self._live))

    def ends(self, instruction: Instruction) -> None:
        """An instruction was carried out."""
        if self._open is not None:
            self._settle(finished=True)

    def measured(self, peak_bytes: Measured, live_bytes: Measured) -> None:
        """A real machine measured the stage that is under way: its peaks, and what is live at its end."""
        self._measured = (dict(peak_bytes), dict(live_bytes))

    def close(self) -> None:
        """Nothing more comes."""
        if self._open is not None:
            self._settle(finished=False)

    def _settle(self, *, finished: bool) -> None:
        assert self._open is not None
        (instruction, begin_s, planned_bytes), end_s = self._open, self._clock()
        self._open = None
        if isinstance(instruction, Copy):
            span = self._copy(instruction, begin_s, end_s, planned_bytes, finished=finished)
            self.spans.append(span)
            return
        assert isinstance(instruction, Run)
        self.spans.append(self._stage(instruction, begin_s, end_s, planned_bytes, finished=finished))
        self.spans += self._copies_alongside(begin_s, end_s, finished=finished)

    def _copies_alongside(self, begin_s: float, end_s: float, *, finished: bool) -> Iterator[Span]:
        """Yield the copies that ran while a stage did, one behind the other on each lane, as long as they are large."""
        copies, self._alongside = self._alongside, []
        for lane in (Lane.COPIES, Lane.DISK):
            mine = [item for item in copies if _lane(item[0]) is lane]
            total = sum(self.plan.values[copy.value].nbytes for copy, _ in mine)
            at_s = begin_s
            for copy, planned_bytes in mine:
                until_s = at_s + (end_s - begin_s) * self.plan.values[copy.value].nbytes / max(1, total)
                yield self._copy(copy, at_s, min(until_s, end_s), planned_bytes, finished=finished)
                at_s = min(until_s, end_s)

    def _copy(
        self, copy: Copy, begin_s: float, end_s: float, planned_bytes: dict[Tier, int], *, finished: bool
    ) -> Span:
        return Span(
            lane=_lane(copy),
            name=copy.value,
            kind="fetch" if copy.target is Tier.DEVICE else "spill",
            begin_s=begin_s,
            end_s=end_s,
            planned_bytes=planned_bytes,
            moved_bytes=self.plan.values[copy.value].nbytes,
            route=f"{copy.source}->{copy.target}",
            finished=finished,
        )

    def _stage(self, run: Run, begin_s: float, end_s: float, planned_bytes: dict[Tier, int], *, finished: bool) -> Span:
        measured, self._measured = self._measured, None
        if measured is not None:
            for tier, nbytes in measured[0].items():
                self.samples.setdefault(tier, []).append(Sample(begin_s, end_s, nbytes, measured[1][tier]))
        return Span(
            lane=Lane.WORKER,
            name=run.stage,
            kind=self.plan.stages[run.stage].kind,
            begin_s=begin_s,
            end_s=end_s,
            planned_bytes=planned_bytes,
            measured_bytes=measured[0] if measured is not None else None,
            streamed_bytes=run.streamed_bytes,
            finished=finished,
        )

    # What can be asked

    @property
    def end_s(self) -> float:
        """When the last thing happened."""
        last = [changes[-1].at_s for changes in self.changes.values() if changes]
        return max([0.0, *last, *(span.end_s for span in self.spans[-1:])])

    @property
    def started(self) -> bool:
        """Whether anything happened."""
        return any(self.changes.values()) or bool(self.spans)

    def stages(self) -> dict[str, Span]:
        """Return the spans of the stages, by name, in the order in which they ran."""
        return {span.name: span for span in self.spans if span.lane is Lane.WORKER}

    def peak(self, tier: Tier) -> Peak:
        """Return the first moment at which ``tier`` held the most bytes."""
        changes = self.changes[tier]
        if not changes:
            return Peak(at_s=0.0, live_bytes=0, residents={})
        index = max(range(len(changes)), key=lambda item: (changes[item].live_bytes, -item))
        residents: dict[str, int] = {}
        for change in changes[: index + 1]:
            if change.nbytes >= 0 and change.entry not in residents:
                residents[change.entry] = change.nbytes
            else:
                del residents[change.entry]
        return Peak(at_s=changes[index].at_s, live_bytes=changes[index].live_bytes, residents=residents)


def _lane(copy: Copy) -> Lane:
    return Lane.DISK if Tier.DISK in (copy.source, copy.target) else Lane.COPIES


# The Chrome trace format, which Perfetto reads


def chrome_trace(recordings: Iterable[Recording]) -> str:
    """Return recordings as one trace, each a process with the same lanes and counters.

    Counters ``device``, ``host`` and ``disk`` are the ledger's bytes after each change. A real run has a counter such
    as ``device measured`` beside each: every stage's measured peak while it ran, and what was live after it.
    """
    recordings = list(recordings)
    events = ",\n".join(
        json.dumps(event, separators=(",", ":"))
        for index, recording in enumerate(recordings)
        for event in _events(recording, index + 1)
    )
    about = json.dumps(_about(recordings))
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{events}\n]}}\n'


def _about(recordings: list[Recording]) -> dict[str, object]:
    first = recordings[0]
    return {
        "plan": first.plan.name,
        "choices": json.dumps(dict(first.plan.choices)),
        **{f"budget_{tier}_bytes": nbytes for tier, nbytes in first.budget.as_dict().items()},
    }


TID_STRIDE = 100
# Readers take a thread's number for unique in all processes, 0 for the idle thread and the process's own for its main
# thread, so the lanes of process 1 are 100, 101, 102 and those of process 2 follow from 200.


def _events(recording: Recording, pid: int) -> Iterator[dict[str, object]]:
    yield _metadata("process_name", pid, name=recording.process)
    yield _metadata("process_sort_index", pid, sort_index=pid)
    lanes = {lane: TID_STRIDE * pid + index for index, lane in enumerate(Lane)}
    for lane, tid in lanes.items():
        yield _metadata("thread_name", pid, tid, name=str(lane))
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
    for span in recording.spans:
        begin, end = _ticks(span.begin_s), _ticks(span.end_s)
        yield {
            "ph": "X", "pid": pid, "tid": lanes[span.lane], "name": span.name, "cat": span.kind,
            "ts": begin / _TICKS_PER_US, "dur": (end - begin) / _TICKS_PER_US, "args": span.arguments(),
        }  # fmt: skip
    for tier, changes in recording.changes.items():
        for change in changes:
            yield _counter(pid, str(tier), change.at_s, change.live_bytes)
    for name, samples in recording.samples.items():
        for sample in samples:
            yield _counter(pid, f"{name} measured", sample.begin_s, sample.peak_bytes)
            yield _counter(pid, f"{name} measured", sample.end_s, sample.live_bytes)


def _metadata(name: str, pid: int, tid: int = 0, /, **arguments: object) -> dict[str, object]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": arguments}


def _counter(pid: int, name: str, at_s: float, nbytes: int) -> dict[str, object]:
    return {"ph": "C", "pid": pid, "name": name, "ts": _ticks(at_s) / _TICKS_PER_US, "args": {"bytes": nbytes}}


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)
