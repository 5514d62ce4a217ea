"""Schedules of small plans, instruction by instruction: what goes where, what leaves first, what a refusal says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.driver import drive
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile
from engine.plan import ALL_TIERS, Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.schedule import (
    Copy,
    Create,
    Drop,
    Instruction,
    Run,
    Schedule,
    device_floor,
    make_schedule,
    staging_need,
)
from engine.simulated import SimulatedMachine

DEVICE, HOST, DISK = Tier
SECONDS = HardwareProfile(
    name="round",
    flops_per_s=1.0,
    attention_flops_per_s=1.0,
    attention_backward_flops_per_s=1.0,
    attention_scores_per_s=1.0,
    memory_bytes_per_s=1.0,
    weight_bytes_per_s=1.0,
    kernel_s=1.0,
    stage_s=0.0,
    host_link_bytes_per_s=10.0,
    fresh_bytes_per_s=1e21,
    copy_s=0.0,
    disk_read_bytes_per_s=5.0,
    disk_write_bytes_per_s=5.0,
    file_s=0.0,
    array_s=0.0,
    saved_bytes_per_s=5.0,
    overlap=1.0,
)


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def stage(name: str, **needs: Any) -> Stage:
    return Stage(name=name, kind="work", run=nothing, **needs)


def value(name: str, nbytes: int = 10, tiers: tuple[Tier, ...] = ALL_TIERS, **options: Any) -> Value:
    spec = TensorSpec(shape=(nbytes,), dtype="uint8")
    return Value(name=name, tensors={"t": spec}, tiers=tiers, **options)


def paged(name: str, **options: Any) -> Value:
    """Five pieces of two bytes."""
    spec = TensorSpec(shape=(5, 2), dtype="uint8")
    return Value(name=name, tensors={"t": spec}, kind=ValueKind.ORDERED, **options)


def plan_of(values: list[Value], *stages: Stage) -> Plan:
    plan = Plan(name="p")
    for item in values:
        plan.value(item)
    for each in stages:
        plan.add(each)
    return plan


def in_its_order(plan: Plan) -> Plan:
    """Return the plan as a builder's, which runs in no order but its own."""
    plan.choices = {"chunk_tokens": 64}
    return plan


def budget(device: int, host: int = UNLIMITED_BYTES, disk: int = UNLIMITED_BYTES) -> Budget:
    return Budget(device_bytes=device, host_bytes=host, disk_bytes=disk)


def moves(schedule: Schedule) -> list[tuple[str, Tier, Tier]]:
    return [(item.value, item.source, item.target) for item in schedule.instructions if isinstance(item, Copy)]


def chain() -> Plan:
    """Three Values of ten bytes, written in turn and read in the order c, a, b; a builder's, which keeps its order."""
    plan = plan_of(
        [value("a"), value("b"), value("c")],
        stage("wa", writes=("a",)),
        stage("wb", writes=("b",)),
        stage("wc", writes=("c",)),
        stage("rc", reads=("c",)),
        stage("ra", reads=("a",)),
        stage("rb", reads=("b",)),
    )
    return in_its_order(plan)


def test_where_everything_fits_nothing_moves_and_everything_is_dropped_after_its_last_use() -> None:
    expected: list[Instruction] = []
    for name in "abc":
        expected += [
            Create(value=name, tier=DEVICE),
            Run(stage=f"w{name}", workspace_bytes=0, buffer_bytes=0),
        ]
    for name in "cab":
        expected += [
            Run(stage=f"r{name}", workspace_bytes=0, buffer_bytes=0),
            Drop(value=name, tier=DEVICE),
        ]
    schedule = make_schedule(chain(), unlimited(), SECONDS)
    assert list(schedule.instructions) == expected
    assert schedule.peak_bytes == {DEVICE: 30, HOST: 0, DISK: 0}
    assert Counter(type(item) for item in schedule.instructions) == {Create: 3, Run: 6, Drop: 3}


def test_what_is_used_last_leaves_first_and_comes_back_for_its_stage() -> None:
    assert moves(make_schedule(chain(), budget(20), SECONDS)) == [("b", DEVICE, HOST), ("b", HOST, DEVICE)]


def test_a_plan_of_a_persons_own_runs_in_an_order_in_which_nothing_leaves() -> None:
    plan = chain()
    plan.choices = {}
    schedule = make_schedule(plan, budget(10), SECONDS)
    assert moves(schedule) == []
    assert sorted(stage.name for stage in schedule.stages) == ["ra", "rb", "rc", "wa", "wb", "wc"]


def test_what_leaves_goes_to_the_host_while_it_has_room_and_then_to_disk() -> None:
    schedule = make_schedule(chain(), budget(10, host=11), SECONDS)
    assert [(name, target) for name, _, target in moves(schedule) if target is not DEVICE] == [("a", HOST), ("b", DISK)]
    assert schedule.staging_bytes == 1
    assert schedule.peak_bytes == {DEVICE: 10, HOST: 11, DISK: 10}


def test_a_value_that_may_not_go_to_disk_does_not() -> None:
    plan = chain()
    plan.values["b"] = value("b", tiers=(DEVICE, HOST))
    refusal = r"20 B have to leave the device .* need 11 B \(11 bytes\) of the host, 1 B of it"
    with pytest.raises(DoesNotFitError, match=refusal):
        make_schedule(plan, budget(10, host=0), SECONDS)


def test_a_kept_value_is_never_dropped() -> None:
    plan = plan_of([value("a", keep=True)], stage("wa", writes=("a",)))
    assert not any(isinstance(item, Drop) for item in make_schedule(plan, unlimited(), SECONDS).instructions)


def test_a_value_with_one_use_is_dropped_right_after_it() -> None:
    plan = plan_of([value("a"), value("b")], stage("wa", writes=("a",)), stage("wb", writes=("b",)))
    assert make_schedule(plan, unlimited(), SECONDS).peak_bytes[DEVICE] == 10


def test_a_streamed_value_needs_no_buffer_on_the_device_two_where_there_is_room_and_else_one() -> None:
    stream = Stream(values=("p",), updates=True)
    plan = plan_of([paged("p")], stage("a", streams=(stream,), workspace_bytes=5))
    assert make_schedule(plan, unlimited(), SECONDS).peak_bytes == {DEVICE: 15, HOST: 0, DISK: 0}
    assert make_schedule(plan, budget(14), SECONDS).peak_bytes == {DEVICE: 9, HOST: 10, DISK: 0}
    assert make_schedule(plan, budget(8), SECONDS).peak_bytes == {DEVICE: 7, HOST: 10, DISK: 0}


def test_the_binding_stage_is_the_one_during_which_the_peak_is_reached() -> None:
    plan = plan_of(
        [value("a")], stage("wa", writes=("a",)), stage("big", workspace_bytes=50), stage("ra", reads=("a",))
    )
    assert make_schedule(plan, unlimited(), SECONDS).binding_stage == "big"
    assert device_floor(plan)[1].name == "big"


def test_the_floor_counts_what_is_pinned_while_it_lives_and_not_what_can_leave() -> None:
    plan = plan_of(
        [value("pin", tiers=(DEVICE,)), value("free", nbytes=100)],
        stage("first", writes=("pin",)),
        stage("second", writes=("free",), workspace_bytes=1),
        stage("third", workspace_bytes=95),
        stage("last", reads=("pin",)),
        stage("after", workspace_bytes=107),
        stage("read", reads=("free",)),
    )
    nbytes, binding = device_floor(plan)
    assert (nbytes, binding.name) == (111, "second")


def test_a_plan_with_values_that_live_on_the_device_only_runs_in_its_own_order() -> None:
    plan = chain()
    plan.choices = {}
    plan.values["c"] = value("c", tiers=(DEVICE,))
    assert [each.name for each in make_schedule(plan, budget(10), SECONDS).stages] == list(plan.stages)


def test_a_stage_without_values_has_on_either_side_what_it_has_in_the_plan() -> None:
    plan = plan_of(
        [value("a"), value("b")],
        stage("wa", writes=("a",)),
        stage("wb", writes=("b",)),
        stage("log"),
        stage("rb", reads=("b",)),
        stage("ra", reads=("a",)),
    )
    order = [each.name for each in make_schedule(plan, budget(10), SECONDS).stages]
    assert set(order[:2]) == {"wa", "wb"}
    assert order[2] == "log"


def test_a_refusal_names_the_stage_its_bytes_and_the_budget() -> None:
    plan = plan_of([value("a", tiers=(DEVICE,))], stage("wa", writes=("a",), workspace_bytes=2000))
    refusal = r"stage wa needs 1\.96 KiB \(2010 bytes\) on the device, .*budget is 1\.00 KiB"
    with pytest.raises(DoesNotFitError, match=refusal):
        make_schedule(plan, budget(1024), SECONDS)


def test_the_staging_buffer_is_the_largest_piece_that_can_pass_through_it() -> None:
    plan = plan_of([value("a", nbytes=7), paged("p"), value("b", nbytes=900, tiers=(DEVICE, HOST))])
    assert staging_need(plan) == 2
    assert staging_need(plan_of([value("b", tiers=(DEVICE, HOST))])) == 0


# The simulated machine


def test_the_virtual_clock_adds_up_stages_and_transfers() -> None:
    plan = plan_of(
        [value("a"), value("b")],
        stage("wa", writes=("a",), cost=Cost(flops=3.0)),
        stage("wb", writes=("b",), cost=Cost(flops=2.0, num_kernels=1)),
        stage("ra", reads=("a",)),
        stage("rb", reads=("b",)),
    )
    in_its_order(plan)
    machine = SimulatedMachine(plan, SECONDS)
    drive(plan, make_schedule(plan, budget(10), SECONDS), budget(10), machine)
    assert machine.stage_s == {"wa": 3.0, "wb": 3.0, "ra": 0.0, "rb": 0.0}
    assert machine.moved_bytes == {"device->host": 20, "host->device": 20}
    assert machine.clock_s == 6.0 + 40 / 10.0


def test_a_stream_costs_one_pass_where_it_is_read_two_where_it_is_updated_none_on_the_device() -> None:
    read, update = (Stream(values=("p",), updates=updates) for updates in (False, True))
    plan = plan_of([paged("p")], stage("u", streams=(update,)), stage("r", streams=(read,)))
    times = {}
    for name, device, host in (("device", 100, 0), ("host", 2, 100), ("disk", 2, 2)):
        machine = SimulatedMachine(plan, SECONDS)
        drive(plan, make_schedule(plan, budget(device, host), SECONDS), budget(device, host), machine)
        times[name] = machine.stage_s
    assert times["device"] == {"u": 0.0, "r": 0.0}
    assert times["host"] == {"u": 2.0, "r": 1.0}
    assert times["disk"] == {"u": 6.0, "r": 3.0}


def test_a_home_on_the_disk_is_paid_once_for_each_of_its_arrays_however_often_its_value_goes_there() -> None:
    specs = {name: TensorSpec(shape=(5,), dtype="uint8") for name in ("left", "right")}
    plan = plan_of(
        [Value(name="a", tensors=specs, kind=ValueKind.ACCUMULATOR), value("b")],
        stage("wa", updates=("a",)),
        *(stage(f"between{n}", workspace_bytes=10) if n % 2 else stage(f"u{n}", updates=("a",)) for n in range(1, 6)),
        stage("wb", writes=("b",)),
        stage("ra", reads=("a",)),
        stage("rb", reads=("b",)),
    )
    in_its_order(plan)
    seconds = {}
    for array_s in (0.0, 0.5):
        profile, little = replace(SECONDS, array_s=array_s), budget(10, host=10)
        schedule = make_schedule(plan, little, profile)
        machine = SimulatedMachine(plan, profile)
        drive(plan, schedule, little, machine)
        assert machine.clock_s == pytest.approx(schedule.seconds, rel=1e-12)
        assert machine.clock_s == machine.compute_s + machine.waited_s
        seconds[array_s] = machine.clock_s
    assert sum(target is DISK for _, _, target in moves(schedule)) > 3
    assert seconds[0.5] - seconds[0.0] == 0.5 * (2 + 1)


def test_a_schedule_over_a_smaller_budget_is_stopped_before_the_instruction_that_would_pass_it() -> None:
    plan = chain()
    machine = SimulatedMachine(plan, SECONDS)
    with pytest.raises(DoesNotFitError, match="b needs 10 B of device, but only 5 B of 15 B are free"):
        drive(plan, make_schedule(plan, unlimited(), SECONDS), budget(15), machine)
    assert list(machine.stage_s) == ["wa"]
