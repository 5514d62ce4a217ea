"""The counters of a trace are the ledger's: random plans, replayed from the trace alone and counted again by hand."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.budget import Budget, Tier, unlimited
from engine.driver import drive
from engine.plan import Plan
from engine.schedule import Copy, Create, Drop, Run, Schedule, make_schedule
from engine.simulated import SimulatedMachine
from engine.trace import PREDICTED, TID_STRIDE, Recording, chrome_trace
from tests.property.test_schedules import SECONDS, budgets, random_plans, real_machine, scheduled

Events = list[dict[str, Any]]


def recorded(plan: Plan, schedule: Schedule, budget: Budget) -> tuple[Recording, dict[Tier, int]]:
    machine = SimulatedMachine(plan, SECONDS)
    recording = Recording(plan, budget, process=PREDICTED, clock=lambda: machine.clock_s)
    ledger = drive(plan, schedule, budget, machine, recorder=recording)
    recording.close()
    return recording, ledger.peak


def counted_by_hand(plan: Plan, schedule: Schedule) -> dict[str, list[int]]:
    """Return the bytes of each tier after each change of it: entries in a list, added up anew each time."""
    entries: dict[str, list[tuple[str, int]]] = {str(tier): [] for tier in Tier}
    found: dict[str, list[int]] = {str(tier): [] for tier in Tier}

    def add(tier: Tier, name: str, nbytes: int) -> None:
        entries[str(tier)].append((name, nbytes))
        found[str(tier)].append(sum(size for _, size in entries[str(tier)]))

    def remove(tier: Tier, name: str) -> None:
        entries[str(tier)] = [entry for entry in entries[str(tier)] if entry[0] != name]
        found[str(tier)].append(sum(size for _, size in entries[str(tier)]))

    if schedule.staging_bytes:
        add(Tier.HOST, "staging", schedule.staging_bytes)
    for item in schedule.instructions:
        match item:
            case Create(value=name, tier=tier):
                add(tier, name, plan.values[name].nbytes)
            case Copy(value=name, target=target):
                if all(entry != name for entry, _ in entries[str(target)]):
                    add(target, name, plan.values[name].nbytes)
            case Drop(value=name, tier=tier):
                remove(tier, name)
            case Run(stage=name):
                add(Tier.DEVICE, f"{name} runs", item.workspace_bytes + item.buffer_bytes)
                remove(Tier.DEVICE, f"{name} runs")
    return found


def counters(events: Events, pid: int = 1) -> dict[str, list[int]]:
    return {
        str(tier): [
            event["args"]["bytes"]
            for event in events
            if (event["ph"], event["pid"], event["name"]) == ("C", pid, str(tier))
        ]
        for tier in Tier
    }


@given(data=st.data(), plan=random_plans())
@settings(max_examples=80)
def test_the_counters_of_a_trace_are_those_that_an_independent_ledger_counts(data: st.DataObject, plan: Plan) -> None:
    budget = data.draw(budgets(plan))
    schedule = scheduled(plan, budget)
    assume(schedule is not None)
    assert schedule is not None
    recording, peak = recorded(plan, schedule, budget)
    events: Events = json.loads(chrome_trace([recording]))["traceEvents"]
    assert counters(events) == counted_by_hand(plan, schedule)
    for tier in Tier:
        top = recording.peak(tier)
        assert top.live_bytes == sum(top.residents.values()) == peak[tier]


@given(data=st.data(), plan=random_plans())
@settings(max_examples=40)
def test_times_never_go_back_and_spans_of_a_lane_never_overlap(data: st.DataObject, plan: Plan) -> None:
    schedule = scheduled(plan, data.draw(budgets(plan)))
    assume(schedule is not None)
    assert schedule is not None
    recording, _ = recorded(plan, schedule, unlimited())
    events: Events = json.loads(chrome_trace([recording]))["traceEvents"]
    for name in map(str, Tier):
        times = [event["ts"] for event in events if event["ph"] == "C" and event["name"] == name]
        assert times == sorted(times)
    for lane in range(3):
        spans = [event for event in events if event["ph"] == "X" and event["tid"] == TID_STRIDE + lane]
        for before, after in itertools.pairwise(spans):
            assert before["ts"] + before["dur"] <= after["ts"]
    runs = [item.stage for item in schedule.instructions if isinstance(item, Run)]
    assert list(recording.stages()) == runs


@given(plan=random_plans(most_stages=12))
@settings(max_examples=15)
def test_a_real_run_has_the_spans_and_the_counters_of_its_simulation(plan: Plan) -> None:
    schedule = make_schedule(plan, unlimited(), SECONDS)
    predicted, _ = recorded(plan, schedule, unlimited())
    with tempfile.TemporaryDirectory() as folder:
        machine, meter = real_machine(plan, Path(folder))
        started = iter(range(10**9))
        measured = Recording(plan, unlimited(), process="measured", clock=lambda: float(next(started)))
        with meter:
            drive(plan, schedule, unlimited(), machine, recorder=measured)
    same = [(span.lane, span.name, span.kind, span.planned_bytes, span.moved_bytes) for span in predicted.spans]
    assert [(span.lane, span.name, span.kind, span.planned_bytes, span.moved_bytes) for span in measured.spans] == same
    events: Events = json.loads(chrome_trace([predicted, measured]))["traceEvents"]
    assert counters(events, 1) == counters(events, 2)
