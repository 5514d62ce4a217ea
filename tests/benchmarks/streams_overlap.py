"""What two buffers hide: one stage that goes through pieces on host or disk, with one buffer and with two.

    python -m tests.benchmarks.streams_overlap [--folder DIR] [--rounds N] [--pieces N] [--piece-kib N]

The stage multiplies matrices for about as long as a piece takes to travel, once for every piece: read only, or changed
and written back. *Compute* is the stage with its Value on the device, *transfer* the stage without the matrices;
*hidden* is the share of the shorter of the two that two buffers save. The page cache forgets what is on disk before
every read. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.memory import LiveBytes, keep_freed_memory
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.schedule import staging_need
from engine.store import Store
from engine.units import KIB
from engine.worker import TorchMachine

SIDE = 192
# Of the matrices: one product takes a fraction of a millisecond on one core, less than a piece takes to travel.


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to go through the pieces."""

    tier: Tier
    changes: bool
    products: int
    slots: int


class Bench:
    """A machine whose one Value is made anew on the tier of each case."""

    def __init__(self, folder: Path, pieces: int, piece_bytes: int) -> None:
        self.pieces = pieces
        self.plan = Plan(name="p")
        spec = TensorSpec(shape=(pieces, piece_bytes // 4), dtype="float32")
        self.value = self.plan.value(Value(name="v", tensors={"t": spec}, kind=ValueKind.ORDERED))
        self.case = Case(tier=Tier.DEVICE, changes=False, products=0, slots=1)
        self.left = self.right = torch.ones(SIDE, SIDE)
        stream = Stream(values=("v",), updates=True)
        self.plan.add(Stage(name="s", kind="work", run=self.work, streams=(stream,)))
        self.machine = TorchMachine(
            self.plan, meter=LiveBytes(), store=Store.create(folder / "store"), directory=folder
        )
        self.machine.reserve(staging_need(self.plan))

    def work(self, context: StageContext) -> None:
        for index in range(self.pieces):
            if self.case.changes:
                with context.changing("v", index) as piece:
                    piece[0] += 1
                    self.compute()
            else:
                context.piece("v", index)
                self.compute()

    def compute(self) -> None:
        for _ in range(self.case.products):
            torch.mm(self.left, self.right)

    def seconds(self, case: Case) -> float:
        self.machine.create(self.value, case.tier)
        stage = self.plan.stages["s"]
        self.case = Case(tier=case.tier, changes=True, products=0, slots=1)
        self.machine.run(stage, 1)  # writes every piece
        if case.tier is Tier.DISK:
            forget(self.machine.disk())
        self.case = case
        started = time.perf_counter()
        self.machine.run(stage, case.slots)
        seconds = time.perf_counter() - started
        self.machine.drop(self.value, case.tier)
        return seconds

    def products_for(self, seconds: float) -> int:
        """Return how many products take that long."""
        self.case = Case(tier=Tier.DEVICE, changes=False, products=20, slots=1)
        started = time.perf_counter()
        self.compute()
        return max(1, round(seconds / (time.perf_counter() - started) * 20))


def forget(store: Store) -> None:
    """Put the chunks on disk and out of the page cache."""
    for key in store.checksums("v/t"):
        with open(store.root / key, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(bench: Bench, tier: Tier, changes: bool, rounds: int) -> None:
    def case(products: int, slots: int, where: Tier = tier) -> Callable[[], float]:
        return lambda: bench.seconds(Case(tier=where, changes=changes, products=products, slots=slots))

    transfer_s = statistics.median(case(0, 1)() for _ in range(3))
    products = bench.products_for(transfer_s / bench.pieces)
    ways = {"compute": case(products, 1, Tier.DEVICE), "transfer": case(0, 1), "one": case(products, 1)}
    ways["two"] = case(products, 2)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(way())
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    hidden = (seconds["one"] - seconds["two"]) / min(seconds["compute"], seconds["transfer"])
    print(
        f"{tier!s:5s} {'changed' if changes else 'read':8s}"
        + "  ".join(f"{name} {value * 1e3:7.1f} ms" for name, value in seconds.items())
        + f"  hidden {hidden:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pieces", type=int, default=24)
    parser.add_argument("--piece-kib", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        bench = Bench(Path(folder), arguments.pieces, arguments.piece_kib * KIB)
        for tier in (Tier.HOST, Tier.DISK):
            for changes in (False, True):
                compare(bench, tier, changes, arguments.rounds)


if __name__ == "__main__":
    main()
