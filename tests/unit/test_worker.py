"""The real machine: pieces read the same on every tier, failures name their stage, and no stage passes its bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

from engine.arrays import find_arrays
from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.context import StageContext
from engine.driver import drive
from engine.errors import EngineError, StageFailedError, UsageError
from engine.hardware import PROFILES
from engine.journal import RunFinished, StageCommit, StageIntent, read_journal
from engine.memory import LiveBytes
from engine.plan import ALL_TIERS, Plan, Stage, Stream, Tap, TensorSpec, Value, ValueKind
from engine.planner import forecast
from engine.runtime import Outcome, execute
from engine.schedule import make_schedule, staging_need
from engine.store import Store
from engine.tensors import dtype_name, torch_dtype
from engine.worker import TorchMachine

PAGES = TensorSpec(shape=(3, 2, 4, 5), dtype="float32")  # three pieces of two parts with four tokens


def rows(start: float, tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Two parts of ``tokens`` rows, all numbers different."""
    numbers = torch.arange(2 * tokens * 5, dtype=torch.float64).view(2, tokens, 5) / 7 + start
    return list(numbers.to(dtype))


def machine_with(tier: Tier, folder: Path, spec: TensorSpec = PAGES) -> tuple[TorchMachine, StageContext]:
    """A machine with one paged Value ``p`` on ``tier``, and the context of a stage that streams it."""
    plan = Plan(name="p")
    value = plan.value(Value(name="p", tensors={"pages": spec}, kind=ValueKind.ORDERED))
    stream = Stream(values=("p",), updates=True)
    stage = plan.add(Stage(name="s", kind="work", run=lambda context: None, streams=(stream,)))
    machine = TorchMachine(plan, meter=LiveBytes(), store=Store.create(folder / "store"), directory=folder)
    machine.reserve(staging_need(plan))
    machine.create(value, tier)
    return machine, StageContext(machine, stage)


def pieces(context: StageContext, count: int = 3) -> torch.Tensor:
    return torch.stack([context.piece("p", index).clone() for index in range(count)])


# Pieces


@pytest.mark.parametrize("tier", Tier)
def test_a_piece_that_was_never_written_reads_as_zero(tier: Tier, tmp_path: Path) -> None:
    _, context = machine_with(tier, tmp_path)
    context.write_rows("p", 1, 0, rows(1, 4))
    found = pieces(context)
    assert torch.equal(found[1], torch.stack(rows(1, 4)))
    assert not found[0].any()
    assert not found[2].any()


@pytest.mark.parametrize("tier", Tier)
def test_a_piece_that_was_written_in_part_is_zero_elsewhere(tier: Tier, tmp_path: Path) -> None:
    _, context = machine_with(tier, tmp_path)
    context.write_rows("p", 0, 1, rows(1, 2))
    context.add_rows("p", 2, 3, rows(2, 1))
    expected = torch.zeros(3, 2, 4, 5)
    expected[0, :, 1:3] = torch.stack(rows(1, 2))
    expected[2, :, 3:] = torch.stack(rows(2, 1))
    assert torch.equal(pieces(context), expected)


@pytest.mark.parametrize("tier", Tier)
def test_rows_are_added_to_and_written_over_what_is_there(tier: Tier, tmp_path: Path) -> None:
    _, context = machine_with(tier, tmp_path)
    context.write_rows("p", 0, 0, rows(1, 4))
    context.add_rows("p", 0, 1, rows(5, 2))
    context.write_rows("p", 0, 3, rows(9, 1))
    expected = torch.stack(rows(1, 4))
    expected[:, 1:3] += torch.stack(rows(5, 2))
    expected[:, 3:] = torch.stack(rows(9, 1))
    assert torch.equal(context.piece("p", 0), expected)


@pytest.mark.parametrize("tier", Tier)
def test_a_piece_that_is_changed_in_place_is_changed_wherever_it_lives(tier: Tier, tmp_path: Path) -> None:
    _, context = machine_with(tier, tmp_path)
    context.write_rows("p", 2, 0, rows(1, 4))
    for index, factor in ((0, 2.0), (2, 3.0), (2, 0.5)):
        with context.changing("p", index) as piece:
            piece.add_(1).mul_(factor)
    found = pieces(context)
    assert torch.equal(found[0], torch.full((2, 4, 5), 2.0))
    assert torch.equal(found[1], torch.zeros(2, 4, 5))
    assert torch.equal(found[2], ((torch.stack(rows(1, 4)) + 1) * 3 + 1) * 0.5)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_an_error_while_a_piece_is_changed_leaves_it_as_it_was(tier: Tier, tmp_path: Path) -> None:
    _, context = machine_with(tier, tmp_path)
    context.write_rows("p", 1, 0, rows(1, 4))

    def change() -> None:
        with context.changing("p", 1) as piece:
            piece.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    assert torch.equal(context.piece("p", 1), torch.stack(rows(1, 4)))


def test_a_piece_that_is_changed_on_the_device_is_the_value_itself(tmp_path: Path) -> None:
    machine, context = machine_with(Tier.DEVICE, tmp_path)
    with context.changing("p", 1) as piece:
        assert piece.data_ptr() == machine.held["p"].tensors["pages"][1].data_ptr()


def move(machine: TorchMachine, value: Value, source: Tier, target: Tier) -> None:
    machine.copy(value, source, target, alongside=False)
    machine.drop(value, source)


@pytest.mark.parametrize(("source", "target"), [pair for pair in permutations(Tier, 2) if Tier.DEVICE in pair])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int64", "bool"])
def test_a_copy_changes_no_bit_and_outlives_its_source(source: Tier, target: Tier, dtype: str, tmp_path: Path) -> None:
    machine, context = machine_with(source, tmp_path, TensorSpec(shape=PAGES.shape, dtype=dtype))
    context.write_rows("p", 0, 0, rows(1, 4, torch_dtype(dtype)))
    context.write_rows("p", 2, 1, rows(2, 2, torch_dtype(dtype)))
    before = pieces(context)
    move(machine, machine.plan.values["p"], source, target)
    after = pieces(StageContext(machine, machine.plan.stages["s"]))  # stages run between moves
    assert after.dtype is torch_dtype(dtype)
    assert torch.equal(after, before)
    assert machine.held["p"].tier is target
    assert machine.store is not None
    assert list(find_arrays(machine.store.root)) == (["p/pages"] if target is Tier.DISK else [])


def test_every_bit_pattern_of_bfloat16_survives_the_disk(tmp_path: Path) -> None:
    spec = TensorSpec(shape=(2, 1, 128, 256), dtype="bfloat16")
    machine, context = machine_with(Tier.DEVICE, tmp_path, spec)
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    machine.held["p"].tensors["pages"].view(torch.uint16).view(-1).copy_(patterns)
    move(machine, machine.plan.values["p"], Tier.DEVICE, Tier.DISK)
    array = zarr.open_array(store=tmp_path / "store", path="p/pages", mode="r")
    assert (str(array.dtype), array.attrs["torch_dtype"]) == ("uint16", "bfloat16")
    assert torch.equal(torch.from_numpy(array[:]).view(-1), patterns)
    move(machine, machine.plan.values["p"], Tier.DISK, Tier.DEVICE)
    assert torch.equal(machine.held["p"].tensors["pages"].view(torch.uint16).view(-1), patterns)
    assert context.piece("p", 0).dtype is torch.bfloat16


def test_a_scalar_survives_the_disk(tmp_path: Path) -> None:
    plan = Plan(name="p")
    value = plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(), dtype="float32")}))
    machine = TorchMachine(plan, meter=LiveBytes(), store=Store.create(tmp_path / "store"), directory=None)
    machine.reserve(staging_need(plan))
    machine.create(value, Tier.DEVICE)
    machine.held["v"].tensors["t"].fill_(1.25)
    move(machine, value, Tier.DEVICE, Tier.DISK)
    move(machine, value, Tier.DISK, Tier.DEVICE)
    assert machine.held["v"].tensors["t"].item() == 1.25


def test_dropping_a_value_on_disk_leaves_no_chunk(tmp_path: Path) -> None:
    machine, context = machine_with(Tier.DISK, tmp_path)
    context.write_rows("p", 0, 0, rows(1, 4))
    assert machine.take_written()["p"].keys() == {"p/pages/c.0.0.0.0"}
    machine.drop(machine.plan.values["p"], Tier.DISK)
    assert machine.store is not None
    assert machine.store.nbytes == 0
    assert [path for path in (tmp_path / "store").rglob("*") if "pages" in path.name] == []


def test_a_value_that_is_not_on_the_device_is_not_handed_out_as_resident(tmp_path: Path) -> None:
    _, context = machine_with(Tier.HOST, tmp_path)
    with pytest.raises(EngineError, match="stage s needs p on the device, but it is on host"):
        context.tensors("p")


def test_indices_are_int64_and_counted(tmp_path: Path) -> None:
    machine, context = machine_with(Tier.HOST, tmp_path)
    index = context.index([[1, 2], [3, 4]])
    assert index.tolist() == [[1, 2], [3, 4]]
    assert machine.meter.live["device"] == 32


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"])
def test_a_dtype_has_one_name(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == name
    assert TensorSpec(shape=(1,), dtype=name).nbytes == torch_dtype(name).itemsize


# Runs


def work_plan(work: Callable[[StageContext], None], **needs: Any) -> Plan:
    """``before`` writes a Value of 400 bytes, ``work`` does what it is given, ``after`` reads the Value."""
    plan = Plan(name="work")
    plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(100,), dtype="float32")}, tiers=(Tier.DEVICE,)))
    plan.add(Stage(name="before", kind="work", run=lambda context: None, writes=("v",)))
    plan.add(Stage(name="work", kind="work", run=work, updates=(), reads=("v",), **needs))
    plan.add(Stage(name="after", kind="work", run=lambda context: None, reads=("v",)))
    return plan


def run(plan: Plan, folder: Path, budget: Budget | None = None) -> Outcome:
    return execute(forecast(plan, budget or unlimited(), PROFILES["cpu"]), folder)


def commits(folder: Path) -> list[str]:
    records, _ = read_journal(folder / "journal.msgpack")
    return [record.stage for record in records if isinstance(record, StageCommit)]


def fail(context: StageContext) -> None:
    raise ZeroDivisionError("one by none")


def test_a_stage_that_raises_stops_the_run_with_its_name_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError) as raised:
        run(work_plan(fail), tmp_path / "run")
    line = fail.__code__.co_firstlineno + 1
    assert str(raised.value) == f"stage work failed: ZeroDivisionError: one by none (test_worker.py line {line})"
    assert raised.value.exit_code == 5
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert commits(tmp_path / "run") == ["before"]


def test_what_a_stage_says_over_several_lines_is_told_on_one(tmp_path: Path) -> None:
    def fail_at_length(context: StageContext) -> None:
        raise ValueError("first\n\n  second\n")

    with pytest.raises(StageFailedError, match=r"^stage work failed: ValueError: first second \(test_worker") as raised:
        run(work_plan(fail_at_length), tmp_path / "run")
    assert len(str(raised.value).splitlines()) == 1


def test_a_stage_that_raises_leaves_its_intent_and_no_result(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError):
        run(work_plan(fail), tmp_path / "run")
    records, _ = read_journal(tmp_path / "run" / "journal.msgpack")
    assert isinstance(records[-1], StageIntent)
    assert records[-1].stage == "work"
    assert not any(isinstance(record, RunFinished) for record in records)


def test_an_interruption_is_not_turned_into_a_failed_stage(tmp_path: Path) -> None:
    def interrupt(context: StageContext) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work_plan(interrupt), tmp_path / "run")


def test_a_stage_that_uses_all_that_was_planned_for_it_is_fine(tmp_path: Path) -> None:
    def use_all(context: StageContext) -> None:
        torch.empty(50).fill_(0)

    outcome = run(work_plan(use_all, workspace_bytes=200), tmp_path / "run")
    assert outcome.stage_peak_bytes["work"] == (600, 600)
    assert outcome.measured_peak_bytes == {"device": 600, "host": 0, "disk": 0}


def use_a_byte_more(context: StageContext) -> None:
    torch.empty(201, dtype=torch.uint8)


@pytest.mark.parametrize("budget_bytes", [600, UNLIMITED_BYTES])
def test_a_stage_that_uses_one_byte_more_than_planned_stops_the_run_with_both_figures(
    budget_bytes: int, tmp_path: Path
) -> None:
    budget = Budget(device_bytes=budget_bytes, host_bytes=0, disk_bytes=0)
    with pytest.raises(StageFailedError) as raised:
        run(work_plan(use_a_byte_more, workspace_bytes=200), tmp_path / "run", budget)
    assert "stage work used" in str(raised.value)
    assert "(601 bytes) of the device, more than the" in str(raised.value)
    assert "(600 bytes) planned for it" in str(raised.value)
    assert raised.value.exit_code == 5


def test_a_stage_that_writes_more_to_the_disk_than_planned_stops_the_run_whatever_the_budget(tmp_path: Path) -> None:
    plan = Plan(name="files")
    spec = TensorSpec(shape=(100,), dtype="uint8")
    plan.value(Value(name="file", tensors={"t": spec}, tiers=(Tier.DISK,), provided=True, keep=True))

    def save(context: StageContext) -> None:
        context.provide("file", disk_bytes=101)

    plan.add(Stage(name="save", kind="work", run=save, writes=("file",)))
    with pytest.raises(StageFailedError, match=r"101 bytes\) of the disk, more than the 100 B \(100 bytes\) planned"):
        run(plan, tmp_path / "run")


def test_a_stage_that_was_stopped_for_its_bytes_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError):
        run(work_plan(use_a_byte_more, workspace_bytes=200), tmp_path / "run")
    assert commits(tmp_path / "run") == ["before"]


def test_what_a_stage_leaves_behind_counts_against_the_next_one(tmp_path: Path) -> None:
    kept: list[torch.Tensor] = []
    plan = work_plan(lambda context: kept.append(torch.empty(50)), workspace_bytes=200)
    with pytest.raises(StageFailedError, match=r"stage after used .*600 bytes.* more than .*400 bytes"):
        run(plan, tmp_path / "run")


def test_what_a_stage_provides_counts_from_then_on_and_dies_with_its_value(tmp_path: Path) -> None:
    plan = Plan(name="provided")
    spec = TensorSpec(shape=(100,), dtype="float32")
    plan.value(Value(name="m", tensors={"t": spec}, kind=ValueKind.ORDERED, tiers=(Tier.DEVICE,), provided=True))

    class Module:
        """Cyclic, as models are."""

        def __init__(self) -> None:
            self.tensor, self.me = torch.zeros(100), self

    def load(context: StageContext) -> None:
        module = Module()
        context.provide("m", [module.tensor], item=module)

    def use(context: StageContext) -> None:
        context.results["sum"] = float(context.item("m").tensor.numpy().sum())

    plan.add(Stage(name="load", kind="work", run=load, writes=("m",)))
    plan.add(Stage(name="use", kind="work", run=use, reads=("m",)))
    plan.add(Stage(name="free", kind="work", run=lambda context: None, workspace_bytes=1))
    outcome = run(plan, tmp_path / "run")
    assert outcome.results["sum"] == 0.0
    assert outcome.stage_peak_bytes == {"load": (400, 400), "use": (400, 400), "free": (1, 0)}


def test_a_stage_that_writes_files_into_no_run_says_so() -> None:
    plan = work_plan(lambda context: context.results.update(where=context.directory))
    machine = TorchMachine(plan, meter=LiveBytes(), store=None, directory=None)
    with pytest.raises(EngineError, match="stage work writes files, but this run has no directory"):
        drive(plan, make_schedule(plan, unlimited(), PROFILES["cpu"]), unlimited(), machine)


def test_a_tap_is_called_with_its_path_right_after_its_stage(tmp_path: Path) -> None:
    seen: list[str] = []
    plan = work_plan(lambda context: seen.append("work"))
    plan.taps["extra"] = Tap(after="work", run=lambda context, path: seen.append(f"{context.stage.name} {path}"))
    target = str(tmp_path / "extra.bin")
    execute(forecast(plan, unlimited(), PROFILES["cpu"]), tmp_path / "run", wanted={"extra": target})
    assert seen == ["work", f"work {target}"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"extra": "x"}, "plan 'work' can't save extra; it offers nothing"), ({"t": "no/where/x"}, "does not exist")],
)
def test_an_extra_output_that_can_not_be_written_is_refused_before_anything_is(
    wanted: dict[str, str], message: str, tmp_path: Path
) -> None:
    plan = work_plan(lambda context: None)
    if "t" in wanted:
        plan.taps["t"] = Tap(after="work", run=lambda context, path: None)
    with pytest.raises(UsageError, match=message):
        execute(forecast(plan, unlimited(), PROFILES["cpu"]), tmp_path / "run", wanted=wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_uses_the_disk_measures_what_it_planned(tmp_path: Path) -> None:
    plan = Plan(name="disk")
    plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(10, 10), dtype="float32")}, tiers=ALL_TIERS))

    def write(context: StageContext) -> None:
        context.tensors("v")["t"].fill_(3)

    def work(context: StageContext) -> None:
        torch.empty(100)

    plan.add(Stage(name="write", kind="work", run=write, writes=("v",)))
    plan.add(Stage(name="work", kind="work", run=work, workspace_bytes=400))
    plan.add(
        Stage(
            name="read",
            kind="work",
            run=lambda c: c.results.update(last=float(c.tensors("v")["t"].numpy()[9, 9])),
            reads=("v",),
        )
    )
    budget = Budget(device_bytes=400, host_bytes=40, disk_bytes=400)
    outcome = run(plan, tmp_path / "run", budget)
    assert outcome.measured_peak_bytes == {"device": 400, "host": 40, "disk": 400}
    assert outcome.results == {"last": 3.0}


@pytest.mark.parametrize("durable", [False, True])
def test_what_a_durable_stage_puts_on_the_disk_is_durable_before_its_commit_is(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(name="disk")
    for name in ("a", "b"):
        plan.value(Value(name=name, tensors={"t": PAGES}, kind=ValueKind.ORDERED, tiers=(Tier.DISK,)))

    def work(context: StageContext) -> None:
        (stream,) = context.stage.streams
        context.write_rows(stream.values[0], 1, 0, rows(1, 4))

    for name in ("a", "b"):
        stream = Stream(values=(name,), updates=True, buffered=False)
        last = durable and name == "b"
        plan.add(Stage(name=name, kind="work", run=work, streams=(stream,), durable=last, workspace_bytes=1024))
    synced: list[str] = []
    real_fsync, real_fdatasync = os.fsync, os.fdatasync

    def note(sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(fd: int) -> None:
            synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path / "run"))
            sync(fd)

        return noted

    monkeypatch.setattr(os, "fsync", note(real_fsync))
    monkeypatch.setattr(os, "fdatasync", note(real_fdatasync))
    run(plan, tmp_path / "run")
    in_store = [name for name in synced if name.startswith("store/")]
    assert [name for name in in_store if "/c." in name] == (["store/b/t/c.1.0.0.0"] if durable else [])
    if durable:
        assert "journal.msgpack" in synced[synced.index(in_store[-1]) :]


def test_the_disk_bytes_of_a_stage_are_those_since_it_began_and_the_peak_is_of_all(tmp_path: Path) -> None:
    machine, context = machine_with(Tier.DISK, tmp_path)
    piece_bytes, value = PAGES.nbytes // 3, machine.plan.values["p"]
    for index in range(3):
        context.write_rows("p", index, 0, rows(1, 4))
    machine.run(machine.plan.stages["s"])
    assert machine.stage_disk_peak_bytes == 3 * piece_bytes
    machine.drop(value, Tier.DISK)
    machine.create(value, Tier.DISK)
    machine.run(replace(machine.plan.stages["s"], run=lambda context: context.write_rows("p", 0, 0, rows(1, 4))))
    assert machine.stage_disk_peak_bytes == piece_bytes
    assert machine.disk_peak_bytes == 3 * piece_bytes
