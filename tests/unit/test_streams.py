"""Streams: one buffer or two, on any tier, in any order, a stage sees the same bits, and nothing is left behind."""

from __future__ import annotations

import _thread
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import Tier
from engine.context import StageContext
from engine.device import CpuDevice, Device
from engine.errors import RunDirectoryError, StageFailedError, StoreFullError
from engine.memory import DEVICE, HOST, LiveBytes, keep_freed_memory, rss_bytes
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.schedule import staging_need
from engine.store import Store
from engine.streams import THREAD_NAME
from engine.units import KIB, MIB
from engine.worker import TorchMachine
from tests.far_device import FarDevice

PIECES = 4
SHAPE = (2, 3, 5)  # of a piece: parts, tokens, width
VALUES = ("a", "b", "c", "w")  # a and b share a stream, c has one of its own, w is only written
WAIT_S = 20.0
# For what a thread does at once; a test that waits this long has failed.


def make_machine(
    folder: Path, tiers: dict[str, Tier], run: Callable[[StageContext], None], device: Device | None = None
) -> TorchMachine:
    device = CpuDevice() if device is None else device
    plan = Plan(name="p", kind=device.kind)
    for name in VALUES:
        spec = TensorSpec(shape=(PIECES, *SHAPE), dtype="bfloat16" if name == "c" else "float32")
        plan.value(Value(name=name, tensors={"t": spec}, kind=ValueKind.ORDERED))
    streams = (
        Stream(values=("a", "b"), updates=True),
        Stream(values=("c",), updates=True),
        Stream(values=("w",), updates=True, buffered=False),
    )
    plan.add(Stage(name="s", kind="work", run=run, streams=streams))
    meter, store = device.meter(), Store.create(folder / "store")
    machine = TorchMachine(plan, meter=meter, store=store, directory=folder, device=device)
    with meter:
        machine.reserve(staging_need(plan))
        for name in VALUES:
            machine.create(plan.values[name], tiers.get(name, Tier.DISK))
    return machine


def run_stage(machine: TorchMachine, slots: int) -> None:
    with machine.meter:
        machine.run(machine.plan.stages["s"], slots)


def porters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    for thread in porters():  # an interrupt may come before the one who would wait for it knows of it
        thread.join(WAIT_S)
    assert porters() == []


# Bits

places = st.tuples(st.sampled_from(VALUES[:3]), st.integers(0, PIECES - 1))
hints = st.none() | places
rows = st.tuples(st.integers(0, SHAPE[1] - 1), st.integers(1, SHAPE[1])).map(
    lambda r: (r[0], min(r[1], SHAPE[1] - r[0]))
)
steps = st.one_of(
    st.tuples(st.just("read"), places, hints),
    st.tuples(st.just("change"), places, hints),
    st.tuples(st.just("add"), places, hints, rows),
    st.tuples(st.just("write"), places, st.none(), rows),
    st.tuples(st.just("write"), st.tuples(st.just("w"), st.integers(0, PIECES - 1)), st.none(), rows),
)
stages = st.lists(st.lists(steps, max_size=25), min_size=1, max_size=3)


def parts(number: int, name: str, tokens: int) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if name == "c" else torch.float32
    numbers = torch.arange(SHAPE[0] * tokens * SHAPE[2], dtype=torch.float64).view(SHAPE[0], tokens, SHAPE[2])
    return list((numbers / 7 + number).to(dtype))


class Model:
    """What a stage does, to the streams and to plain tensors in memory beside them."""

    def __init__(self) -> None:
        self.truth = {
            (name, index): torch.zeros(SHAPE, dtype=torch.bfloat16 if name == "c" else torch.float32)
            for name in VALUES
            for index in range(PIECES)
        }

    def do(self, context: StageContext, number: int, step: tuple[Any, ...]) -> None:
        what, (name, index), then = step[:3]
        expected = self.truth[name, index]
        if what == "read":
            assert torch.equal(context.piece(name, index, then), expected)
        elif what == "change":
            with context.changing(name, index, then) as piece:
                assert torch.equal(piece, expected)
                for tensor in (piece, expected):
                    tensor.mul_(0.5).add_(number)
        else:
            start, tokens = step[3]
            new = parts(number, name, tokens)
            if what == "add":
                context.add_rows(name, index, start, new, then)
                expected[:, start : start + tokens] += torch.stack(new)
            else:
                context.write_rows(name, index, start, new)
                expected[:, start : start + tokens] = torch.stack(new)

    def check(self, machine: TorchMachine) -> None:
        for (name, index), expected in self.truth.items():
            held = machine.held[name]
            if held.tier is not Tier.DISK:
                found = held.tensors["t"][index]
            elif ("t", index) in held.written:
                array = np.empty((1, *SHAPE), np.uint16 if name == "c" else np.float32)
                machine.disk().read_chunk(f"{name}/t", (index, 0, 0, 0), array)
                found = torch.from_numpy(array)[0].view(expected.dtype)
            else:
                found = torch.zeros(SHAPE, dtype=expected.dtype)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("device", [CpuDevice, FarDevice])
@pytest.mark.parametrize("slots", [1, 2])
@given(work=stages, tiers=st.fixed_dictionaries({name: st.sampled_from(Tier) for name in VALUES}))
@settings(deadline=None, max_examples=60)
def test_whatever_a_stage_does_in_whatever_order_it_finds_what_it_wrote(
    slots: int, device: type[CpuDevice | FarDevice], work: list[list[tuple[Any, ...]]], tiers: dict[str, Tier]
) -> None:
    model, numbers = Model(), iter(range(10**6))
    todo = iter(work)

    def run(context: StageContext) -> None:
        for step in next(todo):
            model.do(context, next(numbers), step)

    with tempfile.TemporaryDirectory() as folder:
        machine = make_machine(Path(folder), tiers, run, device())
        for _ in work:
            run_stage(machine, slots)
            assert porters() == []
            model.check(machine)
        written = {f"{name}/t": held.written for name, held in machine.held.items() if held.tier is Tier.DISK}
        journaled = {key: crc for checksums in machine.take_written().values() for key, crc in checksums.items()}
        assert journaled == {key: crc for name in written for key, crc in machine.disk().checksums(name).items()}


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_rows_that_are_written_while_the_piece_is_still_going_back_are_the_last_word(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()

    def run(context: StageContext) -> None:
        for number, step in enumerate(
            [
                ("change", ("a", 0), None),
                ("change", ("a", 1), None),
                ("read", ("a", 2), None),
                ("write", ("a", 0), None, (1, 1)),
                ("write", ("a", 1), None, (0, 3)),
            ]
        ):
            model.do(context, number + 1, step)

    machine = make_machine(tmp_path, {"a": tier}, run)
    copy, write_piece = np.copyto, machine.write_piece

    def slow(work: Callable[..., None]) -> Callable[..., None]:
        def late(*args: Any) -> None:
            threading.Event().wait(0.05)
            work(*args)

        return late

    monkeypatch.setattr(np, "copyto", slow(copy))
    monkeypatch.setattr(machine, "write_piece", slow(write_piece))
    run_stage(machine, 2)
    monkeypatch.undo()
    model.check(machine)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_piece_whose_change_failed_is_as_it_was_before(slots: int, tier: Tier, tmp_path: Path) -> None:
    model = Model()

    def fail(context: StageContext) -> None:
        with context.changing("a", 0) as piece:
            piece.zero_()
            raise ZeroDivisionError

    def run(context: StageContext) -> None:
        model.do(context, 1, ("change", ("a", 0), None))
        with pytest.raises(ZeroDivisionError):
            fail(context)
        model.do(context, 2, ("read", ("a", 0), None))
        model.do(context, 3, ("change", ("a", 0), None))

    machine = make_machine(tmp_path, {"a": tier}, run)
    run_stage(machine, slots)
    model.check(machine)


# Bytes


@pytest.mark.parametrize("slots", [1, 2])
def test_buffers_are_as_many_pieces_as_slots_for_every_stream_with_something_off_the_device(
    slots: int, tmp_path: Path
) -> None:
    inside: list[int] = []

    def run(context: StageContext) -> None:
        inside.append(context.live_bytes)
        for index in range(PIECES):
            context.piece("b", index)
            context.write_rows("w", index, 0, [torch.zeros(0, 5), torch.zeros(0, 5)])

    machine = make_machine(tmp_path, {"a": Tier.DEVICE, "c": Tier.DEVICE}, run)
    piece_bytes = 4 * 2 * 3 * 5
    before = dict(machine.meter.live)
    assert before == {DEVICE: PIECES * (piece_bytes + piece_bytes // 2), HOST: piece_bytes}
    machine.meter.restart_peak()
    run_stage(machine, slots)
    assert inside == [before[DEVICE] + slots * piece_bytes]
    assert machine.meter.peak == {DEVICE: inside[0], HOST: before[HOST]}
    assert machine.meter.live == before


@pytest.mark.parametrize("slots", [1, 2])
def test_the_resident_set_does_not_grow_with_what_is_on_the_disk(slots: int, tmp_path: Path) -> None:
    """A stage writes, changes and reads 64 MiB in pieces of 256 KiB after having done so with 4 MiB."""
    if not keep_freed_memory():
        pytest.skip("the C allocator keeps freed blocks here")
    piece, total = 256 * KIB, 64 * MIB
    plan = Plan(name="p")
    for name, nbytes in (("small", 4 * MIB), ("large", total)):
        spec = TensorSpec(shape=(nbytes // piece, 1, 1, piece // 4), dtype="float32")
        plan.value(Value(name=name, tensors={"t": spec}, kind=ValueKind.ORDERED))

    def run(context: StageContext) -> None:
        (name,) = context.stage.streams[0].values
        for index in range(plan.values[name].tensors["t"].num_pieces):
            context.write_rows(name, index, 0, [torch.ones(1, piece // 4)])
            context.add_rows(name, index, 0, [torch.ones(1, piece // 4)])
        for index in range(plan.values[name].tensors["t"].num_pieces):
            assert context.piece(name, index)[0, 0, 0] == 2

    for name in plan.values:
        plan.add(Stage(name=name, kind="work", run=run, streams=(Stream(values=(name,), updates=True),)))
    machine = TorchMachine(plan, meter=LiveBytes(), store=Store.create(tmp_path / "store"), directory=tmp_path)
    resident: list[int] = []
    with machine.meter:
        machine.reserve(staging_need(plan))
        for name in plan.values:
            machine.create(plan.values[name], Tier.DISK)
            machine.run(plan.stages[name], slots)
            resident.append(rss_bytes())
    assert machine.disk().nbytes == total + 4 * MIB
    assert resident[1] - resident[0] < total / 32


# What travels


@contextmanager
def seen_reads(machine: TorchMachine, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, threading.Event]]:
    """Events that are set once a piece of ``a`` was read from the disk; reading it again is an error."""
    events = {index: threading.Event() for index in range(PIECES)}
    read_chunk = machine.disk().read_chunk

    def read(name: str, index: tuple[int, ...], out: Any) -> None:
        assert not events[index[0]].is_set()
        read_chunk(name, index, out)
        events[index[0]].set()

    with monkeypatch.context() as patch:
        patch.setattr(machine.disk(), "read_chunk", read)
        yield events


def filled(folder: Path, run: Callable[[StageContext], None]) -> TorchMachine:
    """A machine with ``a`` on the disk, all of its pieces written, whose stage runs ``run``."""

    def fill(context: StageContext) -> None:
        for index in range(PIECES):
            context.write_rows("a", index, 0, parts(index, "a", 3))

    work = iter([fill, run])
    machine = make_machine(folder, {}, lambda context: next(work)(context))
    run_stage(machine, 1)
    return machine


def test_an_announced_piece_comes_while_the_one_before_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: StageContext) -> None:
        order = [2, 0, 3, 1]
        for index, following in zip(order, [*order[1:], None], strict=True):
            context.piece("a", index, None if following is None else ("a", following))
            if following is not None:
                assert events[following].wait(WAIT_S)

    machine = filled(tmp_path, run)
    with seen_reads(machine, monkeypatch) as events:
        run_stage(machine, 2)


def test_pieces_in_a_row_are_foreseen_from_the_third_on_and_no_piece_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(context: StageContext) -> None:
        context.piece("a", 0)
        context.piece("a", 1)
        assert events[2].wait(WAIT_S)
        for index in (1, 2, 2, 3):
            context.piece("a", index)

    machine = filled(tmp_path, run)
    with seen_reads(machine, monkeypatch) as events:
        run_stage(machine, 2)


def test_pieces_out_of_order_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(context: StageContext) -> None:
        for index in (3, 1):
            context.piece("a", index)

    machine = filled(tmp_path, run)
    with seen_reads(machine, monkeypatch) as events:
        run_stage(machine, 2)
    assert [index for index, event in events.items() if event.is_set()] == [1, 3]


def test_a_changed_piece_is_written_while_the_stage_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, written = threading.Event(), threading.Event()

    def run(context: StageContext) -> None:
        with context.changing("a", 0) as piece:
            piece.zero_()
        goes_on.set()
        assert written.wait(WAIT_S)

    machine = filled(tmp_path, run)
    write_piece = machine.write_piece

    def write(*args: Any) -> None:
        assert goes_on.wait(WAIT_S)
        write_piece(*args)
        written.set()

    monkeypatch.setattr(machine, "write_piece", write)
    run_stage(machine, 2)


def test_writing_a_whole_piece_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = filled(tmp_path, lambda context: context.write_rows("a", 1, 0, parts(9, "a", 3)))
    with seen_reads(machine, monkeypatch) as events:
        run_stage(machine, 2)
    assert not any(event.is_set() for event in events.values())


# Errors


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("announced", [False, True])
def test_a_missing_chunk_is_an_error_of_the_stage_in_its_own_words(slots: int, announced: bool, tmp_path: Path) -> None:
    def run(context: StageContext) -> None:
        context.piece("a", 0, ("a", 2) if announced else None)
        context.piece("a", 2)

    machine = filled(tmp_path, run)
    (tmp_path / "store/a/t/c.2.0.0.0").unlink()
    with pytest.raises(RunDirectoryError, match=r"chunk \(2, 0, 0, 0\) of array 'a/t' is missing"):
        run_stage(machine, slots)


def test_a_damaged_chunk_that_was_announced_and_not_used_is_no_error(tmp_path: Path) -> None:
    seen = []

    def run(context: StageContext) -> None:
        context.piece("a", 0, ("a", 2))
        seen.append(context.piece("a", 1)[0, 0, 0].item())

    machine = filled(tmp_path, run)
    (tmp_path / "store/a/t/c.2.0.0.0").write_bytes(bytes(120))
    run_stage(machine, 2)
    assert seen == [1.0]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("how", ["changing", "write_rows"])
def test_a_full_disk_stops_the_stage_even_when_it_was_the_last_thing_written(
    slots: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(context: StageContext) -> None:
        if how == "write_rows":
            context.write_rows("a", 1, 0, parts(9, "a", 3))
        else:
            context.add_rows("a", 1, 0, parts(9, "a", 3))

    machine = filled(tmp_path, run)

    def full(*args: Any) -> None:
        raise StoreFullError("no room", needed_bytes=1, free_bytes=0)

    monkeypatch.setattr(machine, "write_piece", full)
    with pytest.raises(StoreFullError, match="no room"):
        run_stage(machine, slots)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_stage_that_ends_early_leaves_no_thread_and_no_buffer(error: type[BaseException], tmp_path: Path) -> None:
    def run(context: StageContext) -> None:
        context.add_rows("a", 0, 0, parts(9, "a", 3), ("a", 1))
        context.piece("c", 0, ("c", 1))
        assert len(porters()) == 1
        raise error

    machine = filled(tmp_path, run)
    before = dict(machine.meter.live)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else StageFailedError):
        run_stage(machine, 2)
    assert porters() == []
    assert machine.meter.live == before


def test_an_interrupt_while_the_stage_waits_for_a_piece_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(context: StageContext) -> None:
        context.piece("a", 0)

    machine = filled(tmp_path, run)
    released = threading.Event()

    def read(*args: Any) -> None:
        _thread.interrupt_main()
        released.wait(0.2)  # the stage is told while its piece is still on its way

    monkeypatch.setattr(machine.disk(), "read_chunk", read)
    with pytest.raises(KeyboardInterrupt):
        run_stage(machine, 2)
