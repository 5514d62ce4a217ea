"""``engine calibrate``: what this machine takes, measured by the engine itself.

Plans that were made to be measured are executed, and the seconds of their stages, beside their costs, give the prices
of work (`engine.fitting`). Transfers are measured by themselves:

- Pieces are streamed by stages that do nothing else, from host and disk, small ones and large ones: bandwidths, and
  prices of pieces. Once more beside matrix products of the same length, with one buffer and with two: the overlap.
- A large Value is copied to the device: the rate at which memory is taken anew.
- Values of many arrays are spilled to the disk and dropped there: the rate of new files, and the price of an array.

So the figures include what the engine adds: an operator's price that of counting its bytes, a piece's that of its
checksum. Files that were just written are read from the operating system's cache, as they mostly are in a run.

Of a stage's times the median counts, since a run has no luck everywhere; of a transfer's the shortest, since those are
too short for a machine's unrest to even out. Where other programs had the processor meanwhile, or a figure can't be
right, the calibration says so.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.budget import UNLIMITED_BYTES, Budget, Tier
from engine.fitting import Observation, fit_profile, together
from engine.hardware import PROFILES, HardwareProfile
from engine.memory import MMAP_THRESHOLD_BYTES, LiveBytes, keep_freed_memory
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.planner import forecast
from engine.runtime import execute
from engine.store import Store
from engine.trace import MEASURED, Recording
from engine.units import MIB
from engine.worker import TorchMachine

Clock = Callable[[], float]
"""Returns seconds since some moment."""

ROUNDS = 3
_SMALL_BYTES, _LARGE_BYTES = MIB // 16, 2 * MIB
# Sizes of a piece: at the small one its price counts, at the large one bandwidth. Pages of real models lie between.
_NUM_PIECES = 24
_FRESH_BYTES = 2 * MMAP_THRESHOLD_BYTES
# Memory that is certainly not what was just freed.
_OVERLAP_ROUNDS = 20
# Hundredths of a second each, in which a thread has to be woken at the right moments.
_PRODUCTS = 20
# Of matrices, of which the fastest counts.
_ROOMY = Budget(device_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
_LEAST_PART = 0.1
# Of a time that each of its two parts takes at least, whatever was measured.
_LEAST_S = 1e-9
# Of a difference between two measurements that should be positive.
_LEAST_SHARE = 0.8
# Of the time that plans take: less spent on a processor than that means that others had it. What they wait for the disk
# is a few percent.
_MOST_ABOVE_LINK = 4.0
# A disk that is read or written from the cache is as fast as a copy in memory, and often faster than the engine's own
# copies, but not by more than this.


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured profile, and the stages that its prices were fitted to.

    ``processor_share`` is the processor's time in units of the time that the plans took; several threads make it more.
    """

    profile: HardwareProfile
    observations: tuple[Observation, ...]
    processor_share: float

    def doubts(self) -> list[str]:
        """Return a sentence for everything that says that the machine was not idle, or that a figure is off."""
        found = []
        if self.processor_share < _LEAST_SHARE:
            found.append(
                f"plans had a processor for {100 * self.processor_share:.0f} % of their time, so the machine seems busy"
            )
        found += implausible(self.profile, spare_cores=(os.cpu_count() or 1) > torch.get_num_threads())
        return [f"warning: {text}; measure again on an idle machine" for text in found]

    def describe(self) -> str:
        """Say what was measured, and how well the profile's times agree with it."""
        numbers = {key: value for key, value in asdict(self.profile).items() if isinstance(value, float)}
        off = [abs(self.profile.seconds(item.cost) / item.seconds - 1.0) for item in self.observations]
        total_s = sum(item.seconds for item in self.observations)
        fitted_s = sum(self.profile.seconds(item.cost) for item in self.observations)
        return "\n".join(
            [
                *(f"{key:32}{value:.4g}" for key, value in numbers.items()),
                f"fitted to {len(off)} stages of {total_s:.1f} s: {fitted_s:.1f} s, half of them within "
                f"{100 * statistics.median(off):.0f} %",
            ]
        )


def implausible(profile: HardwareProfile, *, spare_cores: bool) -> list[str]:
    """Return what can hardly be true of a measured profile; ``spare_cores`` are those that no kernel used."""
    found = []
    for key in ("disk_read_bytes_per_s", "disk_write_bytes_per_s"):
        rate, link = asdict(profile)[key], profile.host_link_bytes_per_s
        if rate > _MOST_ABOVE_LINK * link:
            found.append(f"{key} is {rate:.2g}, much more than host_link_bytes_per_s, {link:.2g}")
    free = [key for key in ("copy_s", "file_s", "array_s") if not asdict(profile)[key]]
    if free:
        found.append(f"{', '.join(free)}: measured as nothing")
    if spare_cores and not profile.overlap:
        found.append("overlap is 0 though there are spare cores: nothing of a transfer was hidden behind compute")
    return found


def calibrate(
    name: str,
    plans: Iterable[Callable[[], Plan]],
    *,
    rounds: int = ROUNDS,
    tell: Callable[[str], None] = print,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Measure this machine with ``plans``, each executed ``rounds`` times, and return its profile.

    ``tell`` is told what is being measured and what is doubtful about it, ``clock`` asked for the seconds.
    """
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="longstraw-calibrate-") as folder:
        tell("measuring transfers")
        known = _measure_transfers(replace(PROFILES["cpu"], name=name), Path(folder), rounds, clock)
        observations: list[Observation] = []
        plans_as_wholes: list[Observation] = []
        share = _Share(clock)
        for index, make in enumerate(plans):
            tell(f"measuring stages of plan {index + 1}")
            stages = observe(make(), Path(folder) / f"plan{index}", rounds, clock, share)
            observations += stages
            plans_as_wholes.append(together(f"plan {index + 1}", stages))
    profile = fit_profile(name, observations + plans_as_wholes, known)
    found = Calibration(profile=profile, observations=tuple(observations), processor_share=share.of_processor)
    for doubt in found.doubts():
        tell(doubt)
    return found


class _Share:
    """Adds up the time of what is run within, and the processor's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._taken_s = self._processor_s = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        started_s, processor_s = self._clock(), time.process_time()
        yield
        self._taken_s += self._clock() - started_s
        self._processor_s += time.process_time() - processor_s

    @property
    def of_processor(self) -> float:
        return self._processor_s / max(_LEAST_S, self._taken_s)


def observe(plan: Plan, folder: Path, rounds: int, clock: Clock, share: _Share) -> list[Observation]:
    """Execute a plan ``rounds`` times in new folders and return its stages but those that load weights.

    Models that were made to be measured draw them, which no price of work is about.
    """
    planned = forecast(plan, _ROOMY, PROFILES["cpu"])
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        recording = Recording(planned.plan, planned.budget, process=MEASURED, clock=clock)
        with share.counted():
            execute(planned, folder / f"run{number}", recording=recording)
        for name, span in recording.stages().items():
            taken[name].append(span.seconds)
    return [
        Observation(name=stage.name, cost=stage.cost, seconds=statistics.median(taken[stage.name]))
        for stage in planned.schedule.stages
        if not any(_is_loaded(planned.plan.values[name]) for name in stage.writes)
    ]


def _is_loaded(value: Value) -> bool:
    """Return whether a Value is what a stage makes on the device by itself, as models are."""
    return value.provided and Tier.DISK not in value.tiers


# Transfers


def _pieces(tier: Tier, nbytes: int) -> Value:
    spec = TensorSpec(shape=(_NUM_PIECES, nbytes // 4), dtype="float32")
    return Value(name="pieces", tensors={"pieces": spec}, kind=ValueKind.ORDERED, tiers=(tier,))


def _read(context: Any) -> None:
    for index in range(_NUM_PIECES):
        context.piece("pieces", index)


def _change(context: Any) -> None:
    for index in range(_NUM_PIECES):
        with context.changing("pieces", index) as piece:
            piece[:1].add_(1.0)


class _Bench:
    """A machine with pieces on one tier, written once; ``seconds`` runs a stage over them."""

    def __init__(self, tier: Tier, nbytes: int, folder: Path, rounds: int, clock: Clock) -> None:
        value = _pieces(tier, nbytes)
        self._plan, self._rounds, self._clock = Plan(name="transfers"), rounds, clock
        self._plan.value(value)
        store = Store.create(folder) if tier is Tier.DISK else None
        self._machine = TorchMachine(self._plan, meter=LiveBytes(), store=store, directory=None)
        with self._machine.meter:
            self._machine.reserve(nbytes)
            self._machine.create(value, tier)
            self._machine.run(self._stage(_change))

    def _stage(self, run: Callable[[Any], None]) -> Stage:
        return Stage(name="transfer", kind="transfer", run=run, streams=(Stream(values=("pieces",), updates=True),))

    def seconds(self, run: Callable[[Any], None], slots: int = 1, *, rounds: int = 0) -> float:
        """Return the shortest time of ``run`` a piece, in ``rounds`` (or as many as usual)."""

        def once() -> None:
            with self._machine.meter:
                self._machine.run(self._stage(run), slots)

        return _shortest(once, rounds or self._rounds, self._clock) / _NUM_PIECES


def _line(small_s: float, large_s: float) -> tuple[float, float]:
    """Return bytes per second and the price of a piece, from the seconds of a small and a large one."""
    byte_s = max((large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES), _LEAST_PART * large_s / _LARGE_BYTES)
    return 1.0 / byte_s, max(0.0, small_s - _SMALL_BYTES * byte_s)


def _beyond(whole_s: float, link_s: float) -> float:
    """Return what the disk takes of a piece's way, which crosses the link as well, if it can be told apart."""
    return max(whole_s - link_s, _LEAST_PART * whole_s)


def _measure_transfers(known: HardwareProfile, folder: Path, rounds: int, clock: Clock) -> HardwareProfile:
    """Return ``known`` with measured transfers."""
    sizes = (_SMALL_BYTES, _LARGE_BYTES)
    host = [_Bench(Tier.HOST, nbytes, folder / "unused", rounds, clock).seconds(_read) for nbytes in sizes]
    link_bytes_per_s, copy_s = _line(*host)
    disks = [_Bench(Tier.DISK, nbytes, folder / f"disk{nbytes}", rounds, clock) for nbytes in sizes]
    read = [disk.seconds(_read) for disk in disks]
    write = [disk.seconds(_change) - seconds for disk, seconds in zip(disks, read, strict=True)]
    spilled = [_spill_s(nbytes, folder / f"arrays{nbytes}", rounds, clock) for nbytes in sizes]
    disk_read, read_s = _line(*map(_beyond, read, host))
    disk_write, _ = _line(*map(_beyond, spilled, host))
    _, write_s = _line(*map(_beyond, write, host))
    measured = replace(
        known,
        host_link_bytes_per_s=link_bytes_per_s,
        fresh_bytes_per_s=_fresh_bytes_per_s(link_bytes_per_s, rounds, clock),
        copy_s=copy_s,
        disk_read_bytes_per_s=disk_read,
        disk_write_bytes_per_s=disk_write,
        file_s=(read_s + write_s) / 2,
        overlap=_measure_overlap(disks[-1], read[-1], clock),
    )
    piece_s = measured.transfer_s(Tier.DEVICE, Tier.DISK, _SMALL_BYTES, 1)
    return replace(measured, array_s=max(0.0, spilled[0] - piece_s))


def _fresh_bytes_per_s(link_bytes_per_s: float, rounds: int, clock: Clock) -> float:
    """Return the rate at which memory is taken anew: what a copy of a large tensor takes beyond the link."""
    large = {"large": TensorSpec(shape=(_FRESH_BYTES // 4,), dtype="float32")}
    copied_s = _copied_s(large, Tier.HOST, Tier.DEVICE, None, rounds, clock)
    return _FRESH_BYTES / _beyond(copied_s, _FRESH_BYTES / link_bytes_per_s)


def _spill_s(nbytes: int, folder: Path, rounds: int, clock: Clock) -> float:
    """Return the shortest time in which an array of one piece is made on the disk, written, and removed."""
    arrays = {f"array{number}": TensorSpec(shape=(1, nbytes // 4), dtype="float32") for number in range(_NUM_PIECES)}
    return _copied_s(arrays, Tier.DEVICE, Tier.DISK, Store.create(folder), rounds, clock) / _NUM_PIECES


def _copied_s(
    tensors: Mapping[str, TensorSpec], source: Tier, target: Tier, store: Store | None, rounds: int, clock: Clock
) -> float:
    """Return the shortest time in which a new copy of a Value is made on ``target``, and dropped."""
    plan = Plan(name="copies")
    value = plan.value(Value(name="copied", tensors=tensors))
    machine = TorchMachine(plan, meter=LiveBytes(), store=store, directory=None)

    def once() -> None:
        machine.copy(value, source, target, alongside=False)
        machine.drop(value, target)

    with machine.meter:
        machine.create(value, source)
        return _shortest(once, rounds, clock)


def _measure_overlap(disk: _Bench, transfer_s: float, clock: Clock) -> float:
    """Return the part of reading pieces of ``transfer_s`` each that matrix products of about that time hide."""
    matrix = torch.ones(256, 256)
    product_s = max(_LEAST_S, _shortest(lambda: matrix @ matrix, _PRODUCTS, clock))
    repeats = max(1, round(transfer_s / product_s))

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(matrix, matrix)

    def read_and_compute(context: Any) -> None:
        for index in range(_NUM_PIECES):
            context.piece("pieces", index)
            compute()

    alone_s, both_s = (disk.seconds(read_and_compute, slots, rounds=_OVERLAP_ROUNDS) for slots in (1, 2))
    hidden_s = alone_s - both_s
    return min(1.0, max(0.0, hidden_s / min(transfer_s, max(_LEAST_S, alone_s - transfer_s))))


def _shortest(work: Callable[[], object], rounds: int, clock: Clock) -> float:
    """Return the shortest time of ``work`` in so many rounds."""
    taken = []
    for _ in range(rounds):
        started_s = clock()
        work()
        taken.append(clock() - started_s)
    return min(taken)
