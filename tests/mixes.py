"""Random small plans in which it matters where things live: transfers take about as long as stages.

Each family is a shape that plans have: chains that remember things, steps of GRPO whose pages are streamed, and any
mixture of residents and streams. A plan depends on its family and its number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from engine.budget import UNLIMITED_BYTES, Budget
from engine.hardware import HardwareProfile
from engine.plan import Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.schedule import device_floor

PROFILE = HardwareProfile(
    name="slow links", flops_per_s=1.0, attention_flops_per_s=1.0, attention_backward_flops_per_s=1.0,
    attention_scores_per_s=1.0, memory_bytes_per_s=1.0, weight_bytes_per_s=1.0, kernel_s=0.0, stage_s=0.0,
    host_link_bytes_per_s=100.0, fresh_bytes_per_s=1e21, copy_s=0.01, disk_read_bytes_per_s=80.0,
    disk_write_bytes_per_s=60.0, file_s=0.02,
    array_s=0.0, saved_bytes_per_s=30.0, overlap=0.9,
)  # fmt: skip
# A stage of one FLOP takes a second, in which a hundred bytes are transferred: sizes and costs below are of that order.


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


class _Builder:
    """Adds Values and stages with random sizes and times."""

    def __init__(self, family: str, number: int) -> None:
        self.rng = random.Random(f"{family} {number}")
        self.plan = Plan(name=f"{family}-{number}")

    def value(self, name: str, nbytes: int, kind: ValueKind = ValueKind.IMMUTABLE, *, keep: bool = False) -> str:
        spec = TensorSpec(shape=(nbytes,), dtype="uint8", piece_rows=nbytes)
        self.plan.value(Value(name=name, tensors={"t": spec}, kind=kind, keep=keep))
        return name

    def pages(self, name: str, num_pieces: int, piece_bytes: int, kind: ValueKind = ValueKind.ORDERED) -> str:
        spec = TensorSpec(shape=(num_pieces, piece_bytes), dtype="uint8")
        self.plan.value(Value(name=name, tensors={"t": spec}, kind=kind))
        return name

    def stage(self, name: str, seconds: float, **needs: Any) -> None:
        self.plan.add(Stage(name=name, kind=name.rstrip("0123456789"), run=nothing, cost=Cost(flops=seconds), **needs))

    def size(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def seconds(self, mean: float) -> float:
        return round(self.rng.uniform(0.4, 1.6) * mean, 2)


def chain(number: int, num_stages: int | None = None) -> Plan:
    """A chain of stages: each hands something to the next, and some of it is read again much later."""
    make = _Builder("chain", number)
    rng, num = make.rng, num_stages or make.size(20, 40)
    old: list[str] = []
    for index in range(num):
        reads = [f"v{index - 1}"] if index else []
        reads += [name for name in rng.sample(old, min(len(old), rng.choice((0, 1, 1, 2)))) if name not in reads]
        made = make.value(f"v{index}", make.size(20, 200))
        make.stage(
            f"s{index}", make.seconds(1.0), reads=tuple(reads), writes=(made,), workspace_bytes=make.size(10, 80)
        )
        old.append(made)
    return make.plan


def ladder(number: int) -> Plan:
    """Forward and back: what each stage of the way there keeps is read on the way back, the last one first."""
    make = _Builder("ladder", number)
    rng, num = make.rng, make.size(8, 18)
    total = make.value("total", make.size(60, 200), ValueKind.ACCUMULATOR, keep=True)
    weights = make.value("weights", make.size(60, 300), ValueKind.ORDERED)
    make.stage("load", 0.2, writes=(weights,))
    for index in range(num):
        make.value(f"kept{index}", make.size(30, 150))
        before = (f"kept{index - 1}",) if index else ()
        make.stage(
            f"there{index}", make.seconds(0.8), reads=(weights, *before), writes=(f"kept{index}",), workspace_bytes=40
        )
    for index in reversed(range(num)):
        reads = [weights, f"kept{index}"] + ([f"back{index + 1}"] if index < num - 1 else [])
        made = make.value(f"back{index}", make.size(20, 80))
        updates = (total,) if rng.random() < 0.8 else ()
        make.stage(
            f"back{index}", make.seconds(1.6), reads=tuple(reads), writes=(made,), updates=updates, workspace_bytes=60
        )
    make.stage("end", 0.3, reads=("back0",), updates=(total,))
    return make.plan


def grpo(number: int) -> Plan:
    """A step of GRPO: prefill, score, loss, replay, sweep; pages and their cotangents are streamed."""
    make = _Builder("grpo", number)
    num_chunks, num_branches, layers = make.size(3, 7), make.size(2, 5), make.size(1, 3)
    piece = make.size(2, 8)
    weights = make.value("weights", make.size(40, 160), ValueKind.ORDERED)
    gradient = make.value("gradient", make.size(40, 160), ValueKind.ACCUMULATOR)
    moments = make.value("moments", make.size(40, 160), ValueKind.ORDERED)
    make.stage("load", 0.1, writes=(weights, moments))
    pages = {(c, y): make.pages(f"pages{c}.{y}", 3, piece) for c in range(num_chunks) for y in range(layers)}
    cotangents = {(c, y): make.pages(f"cotangents{c}.{y}", 3, 2 * piece) for c, y in pages}

    def upto(table: dict[tuple[int, int], str], chunk: int) -> tuple[str, ...]:
        return tuple(name for (c, _), name in table.items() if c < chunk)

    def only(table: dict[tuple[int, int], str], chunk: int) -> tuple[str, ...]:
        return tuple(name for (c, _), name in table.items() if c == chunk)

    for c in range(num_chunks):
        made = make.value(f"boundary{c}", make.size(20, 60))
        before = (f"boundary{c - 1}",) if c else ()
        streams = [Stream(values=only(pages, c), updates=True, buffered=False)]
        streams += [Stream(values=upto(pages, c))] if c else []
        make.stage(
            f"prefill{c}", make.seconds(3.0), reads=(weights, *before), writes=(made,), streams=tuple(streams),
            workspace_bytes=60,
        )  # fmt: skip
    for b in range(num_branches):
        make.value(f"scores{b}", 10)
        make.stage(
            f"score{b}", make.seconds(2.0), reads=(weights, f"boundary{num_chunks - 1}"), writes=(f"scores{b}",),
            streams=(Stream(values=upto(pages, num_chunks)),), workspace_bytes=80,
        )  # fmt: skip
    make.value("derivatives", 10 * num_branches)
    make.stage("loss", 0.1, reads=tuple(f"scores{b}" for b in range(num_branches)), writes=("derivatives",))
    boundary = make.value("boundary_cotangent", 60, ValueKind.ORDERED)
    for b in range(num_branches):
        make.stage(
            f"replay{b}", make.seconds(5.0), reads=(weights, "derivatives", f"boundary{num_chunks - 1}"),
            updates=(gradient, boundary), workspace_bytes=120,
            streams=(Stream(values=upto(pages, num_chunks)), Stream(values=upto(cotangents, num_chunks), updates=True)),
        )  # fmt: skip
    for c in reversed(range(num_chunks)):
        before = (f"boundary{c - 1}",) if c else ()
        streams = [Stream(values=upto(pages, c + 1)), Stream(values=upto(cotangents, c + 1), updates=True)]
        make.stage(
            f"sweep{c}", make.seconds(6.0), reads=(weights, *before), updates=(gradient, boundary),
            streams=tuple(streams), workspace_bytes=150,
        )  # fmt: skip
    make.stage("update", 0.5, reads=(gradient,), updates=(weights, moments), workspace_bytes=40)
    return make.plan


def mixture(number: int, num_stages: int | None = None) -> Plan:
    """Residents and streams, immutable and not, in any mixture; some branches may run in any order."""
    make = _Builder("mixture", number)
    rng = make.rng
    kinds = (ValueKind.IMMUTABLE, ValueKind.IMMUTABLE, ValueKind.ORDERED)
    born: list[str] = []
    waiting: list[tuple[str, bool]] = []
    for index in range(make.size(8, 16)):
        paged = rng.random() < 0.4
        kind = rng.choice(kinds)
        if paged:
            make.pages(f"v{index}", make.size(2, 5), make.size(10, 40), kind)
        else:
            make.value(f"v{index}", make.size(20, 200), kind)
        waiting.append((f"v{index}", paged))
    paged_names = {name for name, paged in waiting if paged}
    for index in range(num_stages or make.size(20, 40)):
        reads: list[str] = []
        writes: list[str] = []
        updates: list[str] = []
        streams: list[Stream] = []
        if waiting and (rng.random() < 0.5 or not born):
            name, paged = waiting.pop()
            if paged:
                streams.append(Stream(values=(name,), updates=True, buffered=rng.random() < 0.5))
            else:
                writes.append(name)
            born.append(name)
        old = [name for name in rng.sample(born, min(len(born), make.size(1, 3))) if name not in writes]
        old = [name for name in old if all(name not in stream.values for stream in streams)]
        for name in old:
            changes = make.plan.values[name].kind is ValueKind.ORDERED and rng.random() < 0.4
            if name in paged_names and rng.random() < 0.8:
                streams.append(Stream(values=(name,), updates=changes))
            elif changes:
                updates.append(name)
            else:
                reads.append(name)
        make.stage(
            f"s{index}", make.seconds(1.2), reads=tuple(reads), writes=tuple(writes), updates=tuple(updates),
            streams=tuple(streams), workspace_bytes=make.size(10, 100),
        )  # fmt: skip
    return make.plan


def short_mixture(number: int) -> Plan:
    """A mixture of so few stages that an optimum over all orders can be proved of most."""
    return mixture(number, random.Random(number).randint(8, 14))


FAMILIES: dict[str, Callable[[int], Plan]] = {
    "chain": chain, "ladder": ladder, "grpo": grpo, "mixture": mixture, "short mixture": short_mixture
}  # fmt: skip


def budget_at(plan: Plan, share: float, everything_bytes: int) -> Budget:
    """Return a budget between a plan's device floor and ``everything_bytes``; host and disk have room."""
    floor, _ = device_floor(plan)
    device_bytes = floor + int(share * (everything_bytes - floor))
    return Budget(device_bytes=device_bytes, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
