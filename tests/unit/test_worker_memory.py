"""What the real machine makes, copies and frees: memory is used again, and nothing of what it held before is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from engine.budget import Tier, unlimited
from engine.context import StageContext
from engine.errors import StageFailedError
from engine.hardware import PROFILES
from engine.memory import LiveBytes
from engine.plan import Plan, Stage, TensorSpec, Value, ValueKind
from engine.planner import forecast
from engine.runtime import execute
from engine.schedule import staging_need
from engine.store import Store
from engine.units import MIB
from engine.worker import COPIES_THREAD_NAME, TorchMachine

PAGES = TensorSpec(shape=(3, 2, 4, 5), dtype="float32")


def numbers() -> torch.Tensor:
    return torch.arange(PAGES.num_elements, dtype=torch.float32).view(PAGES.shape) + 1


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory comes with sevens in it."""
    allocate = TorchMachine._allocate

    def used(self: TorchMachine, spec: TensorSpec, tier: Tier) -> torch.Tensor:
        return allocate(self, spec, tier).fill_(7.0)

    monkeypatch.setattr(TorchMachine, "_allocate", used)


def machine_with(tier: Tier, folder: Path, work: Callable[[StageContext], None] = lambda context: None) -> TorchMachine:
    """A machine with one Value ``p`` on a tier, in a plan with one stage that uses nothing."""
    plan = Plan(name="p")
    value = plan.value(Value(name="p", tensors={"pages": PAGES}, kind=ValueKind.ORDERED))
    plan.add(Stage(name="s", kind="work", run=work))
    machine = TorchMachine(plan, meter=LiveBytes(), store=Store.create(folder / "store"), directory=folder)
    machine.reserve(staging_need(plan))
    machine.create(value, tier)
    return machine


def write_first_piece(machine: TorchMachine) -> None:
    machine.write_piece("p", "pages", 0, numbers()[0], None)
    machine.held["p"].written.add(("pages", 0))


# What is new


@pytest.mark.usefixtures("dirty")
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_a_new_value_is_zero_whatever_its_memory_held_before(tier: Tier, tmp_path: Path) -> None:
    assert not machine_with(tier, tmp_path).held["p"].tensors["pages"].any()


@pytest.mark.usefixtures("dirty")
@pytest.mark.parametrize("alongside", [False, True])
def test_a_copy_from_the_disk_is_zero_where_nothing_was_written(alongside: bool, tmp_path: Path) -> None:
    machine = machine_with(Tier.DISK, tmp_path)
    write_first_piece(machine)
    machine.copy(machine.plan.values["p"], Tier.DISK, Tier.DEVICE, alongside=alongside)
    machine.run(machine.plan.stages["s"])
    expected = torch.zeros(PAGES.shape)
    expected[0] = numbers()[0]
    assert torch.equal(machine.held["p"].tensors["pages"], expected)


# Copies alongside a stage


@pytest.mark.parametrize("home", [Tier.HOST, Tier.DISK])
def test_a_store_alongside_a_stage_is_complete_when_the_stage_is_and_its_bytes_are_measured(
    home: Tier, tmp_path: Path
) -> None:
    machine = machine_with(Tier.DEVICE, tmp_path)
    value = machine.plan.values["p"]
    machine.held["p"].tensors["pages"].copy_(numbers())
    machine.copy(value, Tier.DEVICE, home, alongside=True)
    machine.run(machine.plan.stages["s"])
    assert machine.stage_disk_peak_bytes == machine.disk_peak_bytes == (PAGES.nbytes if home is Tier.DISK else 0)
    machine.drop(value, Tier.DEVICE)
    machine.copy(value, home, Tier.DEVICE, alongside=False)
    assert torch.equal(machine.held["p"].tensors["pages"], numbers())


@pytest.mark.parametrize("fails", ["the stage", "the copy"])
def test_a_failure_of_a_stage_or_of_a_copy_alongside_is_told_and_leaves_no_thread(fails: str, tmp_path: Path) -> None:
    def work(context: StageContext) -> None:
        if fails == "the stage":
            raise ZeroDivisionError("one by none")

    machine = machine_with(Tier.DISK, tmp_path, work)
    write_first_piece(machine)
    if fails == "the copy":
        (tmp_path / "store" / "p" / "pages" / "c.0.0.0.0").write_bytes(b"")
    machine.copy(machine.plan.values["p"], Tier.DISK, Tier.DEVICE, alongside=True)
    with pytest.raises(Exception, match="one by none" if fails == "the stage" else "is damaged"):
        machine.run(machine.plan.stages["s"])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(COPIES_THREAD_NAME)]


# Memory that was freed


def returns(sizes: Mapping[str, int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run stages with workspaces of ``sizes``; return those behind which freed memory was returned."""
    plan, begun, returned = Plan(name="work"), [], []
    plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(100,), dtype="float32")}, kind=ValueKind.ORDERED))

    def work(name: str, nbytes: int) -> Callable[[StageContext], None]:
        def run(context: StageContext) -> None:
            begun.append(name)
            torch.empty(nbytes, dtype=torch.uint8)

        return run

    for name, nbytes in sizes.items():
        plan.add(Stage(name=name, kind="work", run=work(name, nbytes), updates=("v",), workspace_bytes=nbytes))
    monkeypatch.setattr("engine.observers.return_freed_memory", lambda: returned.append(begun[-1]))
    execute(forecast(plan, unlimited(), PROFILES["cpu"]), folder)
    assert begun == list(sizes)
    return returned


def test_freed_memory_goes_back_where_the_next_stage_does_not_work_in_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"a": 64 * MIB, "b": 60 * MIB, "c": 8 * MIB, "d": 64 * MIB, "e": 0}
    found = returns(sizes, tmp_path / "run", monkeypatch)
    assert found == ["b", "d", "e"]  # the last one at the end of the run


@pytest.mark.parametrize(("then", "early"), [(48 * MIB + 1, []), (48 * MIB, ["a"])])
def test_less_than_a_system_call_is_worth_stays(
    then: int, early: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = returns({"a": 64 * MIB, "b": then, "c": then}, tmp_path / "run", monkeypatch)
    assert [name for name in found if name == "a"] == early


# What stages report


@pytest.mark.parametrize("report", [torch.ones(1).numpy()[0], 2**70, "\ud800", {"a": (1,)}, ["x" * 2**20] * 2])
def test_a_report_that_no_journal_holds_stops_the_run_in_its_stage(report: object, tmp_path: Path) -> None:
    def work(context: StageContext) -> None:
        context.results["mine"] = report

    plan = Plan(name="work")
    plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(100,), dtype="float32")}, kind=ValueKind.ORDERED))
    plan.add(Stage(name="first", kind="work", run=work, updates=("v",)))
    plan.add(Stage(name="second", kind="work", run=lambda context: None, updates=("v",)))
    with pytest.raises(StageFailedError, match="stage first reports what the journal can't hold"):
        execute(forecast(plan, unlimited(), PROFILES["cpu"]), tmp_path / "run")
