"""A recording has what the driver did and what the ledger counted, and its trace is what Perfetto wants."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.driver import drive
from engine.errors import StageFailedError
from engine.hardware import PROFILES
from engine.plan import Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.planner import Forecast, forecast
from engine.schedule import make_schedule
from engine.simulated import SimulatedMachine
from engine.trace import PREDICTED, TID_STRIDE, Lane, Recording, chrome_trace
from engine.units import KIB

ONE = TensorSpec(shape=(KIB,), dtype="uint8")
FOUR = TensorSpec(shape=(4, KIB), dtype="uint8")


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def spilling() -> Plan:
    """``v`` makes room for a workspace and comes back; ``p`` is streamed from wherever it is."""
    plan = Plan(name="spilling")
    plan.value(Value(name="v", tensors={"t": ONE}))
    plan.value(Value(name="p", tensors={"t": FOUR}, kind=ValueKind.ORDERED, keep=True))
    cost = Cost(moved_bytes=1e9)
    plan.add(Stage(name="step0/write", kind="write", run=nothing, writes=("v",), cost=cost))
    plan.add(
        Stage(
            name="step0/work", kind="work", run=nothing, streams=(Stream(values=("p",), updates=True),),
            workspace_bytes=KIB, cost=cost,
        )
    )  # fmt: skip
    plan.add(Stage(name="step0/read", kind="read", run=nothing, reads=("v",), cost=cost))
    plan.choices = {"chunk_tokens": 64}  # a builder's plan runs in its own order
    return plan


def planned(host_bytes: int = UNLIMITED_BYTES, device_bytes: int = 2 * KIB) -> Forecast:
    budget = Budget(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=UNLIMITED_BYTES)
    return forecast(spilling(), budget, PROFILES["cpu"])


def events_of(trace: str, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] == phase]


def test_stages_and_moves_are_spans_on_the_lanes_of_the_worker_the_copies_and_the_disk() -> None:
    on_host = [(span.lane, span.name, span.kind, span.route) for span in planned().recording.spans]
    assert on_host == [
        (Lane.WORKER, "step0/write", "write", ""),
        (Lane.COPIES, "v", "spill", "device->host"),
        (Lane.WORKER, "step0/work", "work", ""),
        (Lane.COPIES, "v", "fetch", "host->device"),
        (Lane.WORKER, "step0/read", "read", ""),
    ]
    to_disk = [(span.lane, span.kind, span.route) for span in planned(host_bytes=KIB).recording.spans if span.route]
    assert to_disk == [(Lane.DISK, "spill", "device->disk"), (Lane.DISK, "fetch", "disk->device")]


def test_the_spans_of_a_simulation_lie_end_to_end_on_its_clock() -> None:
    found = planned()
    assert found.recording.spans[0].begin_s == 0
    assert found.recording.end_s == found.makespan_s
    for before, after in itertools.pairwise(found.recording.spans):
        assert before.end_s == after.begin_s
    seconds = {name: span.seconds for name, span in found.recording.stages().items()}
    assert seconds == pytest.approx(found.stage_s)


def test_a_span_says_what_was_planned_to_be_live_and_what_it_moves() -> None:
    spans = planned().recording.spans
    assert spans[1].moved_bytes == KIB
    work = planned().recording.stages()["step0/work"]
    assert work.planned_bytes == {Tier.DEVICE: 2 * KIB, Tier.HOST: 5 * KIB, Tier.DISK: 0}
    assert work.streamed_bytes == 8 * KIB  # four pages come and go
    assert forecast(spilling(), unlimited(), PROFILES["cpu"]).recording.stages()["step0/work"].streamed_bytes == 0


def test_the_residents_of_a_peak_are_what_the_ledger_held_then_and_add_up_to_it() -> None:
    found = planned()
    device, host = (found.recording.peak(tier) for tier in (Tier.DEVICE, Tier.HOST))
    assert (device.live_bytes, host.live_bytes) == (found.peak_bytes[Tier.DEVICE], found.peak_bytes[Tier.HOST])
    assert device.residents == {"workspace of step0/work": 2 * KIB}
    assert host.residents == {"v": KIB, "p": 4 * KIB}
    assert found.recording.peak(Tier.DISK).residents == {}


def test_a_value_without_bytes_comes_and_goes_like_any_other() -> None:
    plan = Plan(name="empty")
    plan.value(Value(name="none", tensors={}))
    plan.value(Value(name="some", tensors={"t": ONE}))
    plan.add(Stage(name="a", kind="a", run=nothing, writes=("none",)))
    plan.add(Stage(name="b", kind="b", run=nothing, reads=("none",)))
    plan.add(Stage(name="c", kind="c", run=nothing, writes=("some",)))
    recording = forecast(plan, unlimited(), PROFILES["cpu"]).recording
    assert recording.peak(Tier.DEVICE).residents == {"some": KIB}


class Failing(SimulatedMachine):
    """Fails in one stage after a second."""

    def run(self, stage: Stage, slots: int = 1) -> None:
        super().run(stage)
        if stage.name == "step0/work":
            self.clock_s += 1
            raise StageFailedError("the stage failed")


def test_what_was_under_way_when_a_run_failed_is_an_unfinished_span() -> None:
    plan, budget = spilling(), unlimited()
    machine = Failing(plan, PROFILES["cpu"])
    recording = Recording(plan, budget, process=PREDICTED, clock=lambda: machine.clock_s)
    with pytest.raises(StageFailedError):
        drive(plan, make_schedule(plan, budget, PROFILES["cpu"]), budget, machine, recorder=recording)
    recording.close()
    assert [(span.name, span.finished) for span in recording.spans] == [("step0/write", True), ("step0/work", False)]
    last = events_of(chrome_trace([recording]), "X")[-1]
    assert last["args"]["unfinished"] is True
    assert last["dur"] == pytest.approx(recording.spans[-1].seconds * 1e6)


def test_measured_bytes_go_with_the_stage_under_way_and_into_a_counter() -> None:
    plan, budget = spilling(), unlimited()
    machine = SimulatedMachine(plan, PROFILES["cpu"])
    recording = Recording(plan, budget, process="measured", clock=lambda: machine.clock_s)

    class Meter:
        def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
            """Nothing to measure yet."""

        def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
            recording.measured({"device": len(stage.name)}, {"device": 1})

    drive(plan, make_schedule(plan, budget, PROFILES["cpu"]), budget, machine, [Meter()], recording)
    stages = recording.stages()
    assert {name: span.measured_bytes for name, span in stages.items()} == {n: {"device": len(n)} for n in stages}
    trace = chrome_trace([recording])
    counter = [event["args"]["bytes"] for event in events_of(trace, "C") if event["name"] == "device measured"]
    assert counter == [item for name in stages for item in (len(name), 1)]
    assert events_of(trace, "X")[0]["args"]["measured_device_bytes"] == len("step0/write")


def test_a_trace_names_its_processes_and_lanes_and_has_one_schema_for_both_kinds_of_run() -> None:
    found = planned()
    machine = SimulatedMachine(found.plan, PROFILES["h200-sxm"])
    other = Recording(found.plan, found.budget, process="measured", clock=lambda: machine.clock_s)
    drive(found.plan, found.schedule, found.budget, machine, recorder=other)
    trace = chrome_trace([found.recording, other])
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events_of(trace, "M")}
    assert names[1, 0, "process_name"] == {"name": "predicted"}
    assert names[2, 0, "process_name"] == {"name": "measured"}
    assert [names[2, 2 * TID_STRIDE + lane, "thread_name"]["name"] for lane in range(3)] == [
        "worker 0",
        "copies",
        "disk",
    ]

    def without_times(phase: str, pid: int) -> list[dict[str, Any]]:
        return [
            {key: item for key, item in event.items() if key not in ("ts", "dur", "pid", "tid")}
            for event in events_of(trace, phase)
            if event["pid"] == pid
        ]

    assert without_times("X", 1) == without_times("X", 2) != []
    assert without_times("C", 1) == without_times("C", 2) != []
    assert json.loads(trace)["otherData"]["budget_device_bytes"] == 2 * KIB


def test_times_in_a_trace_are_whole_nanoseconds_and_never_overlap_on_a_lane() -> None:
    plan = Plan(name="short")
    for index in range(200):  # a third of a microsecond each: no power of two and no power of ten
        plan.add(Stage(name=f"s{index}", kind="s", run=nothing, cost=Cost(num_kernels=1)))
    machine = SimulatedMachine(plan, PROFILES["cpu"])
    recording = Recording(plan, unlimited(), process=PREDICTED, clock=lambda: machine.clock_s / 30)
    drive(plan, make_schedule(plan, unlimited(), PROFILES["cpu"]), unlimited(), machine, recorder=recording)
    spans = events_of(chrome_trace([recording]), "X")
    for before, after in itertools.pairwise(spans):
        assert before["ts"] + before["dur"] == after["ts"]
        assert (before["ts"] * 1000).is_integer()


def test_a_trace_of_hostile_names_is_still_one_json_document() -> None:
    plan = Plan(name='"</script>\n\\')
    plan.add(Stage(name='a"\\</script>', kind="k", run=nothing))
    recording = forecast(plan, unlimited(), PROFILES["cpu"]).recording
    assert events_of(chrome_trace([recording]), "X")[0]["name"] == 'a"\\</script>'
