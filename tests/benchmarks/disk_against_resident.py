"""A step whose state streams from the disk against the same step with its state on the device: time and bits.

    python -m tests.benchmarks.disk_against_resident [--folder DIR] [--rounds N] [--threads N] [--hardware NAME|FILE]

One exact GRPO step of a llama with random weights, with chunks of equal length either way, so that gradients must have
the same bits. In the first work arithmetic takes most of the time, in the second the chunks are so short that moving
the state does. What the simulator says of each (which of the two bounds the time, and how much longer the step from
the disk takes) stands beside what was measured; times are medians of interleaved rounds. On a machine that does other
things at the same time only the ratio of CPU seconds says something: whoever waits for the disk then waits for a core
as well.

The page cache does not stand in for the disk: a process beside writes every chunk file to the disk and has the cache
forget it, all the time. What the step's process then reads from the disk is counted by the kernel. Computing leaves
one core free by default (``--threads``), as a step on an accelerator does.

The script fails if gradients differ in a bit, or if the step from the disk takes more than 1.15 times the resident one
where the simulator says that arithmetic is the bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.budget import Tier
from engine.hardware import load_profile
from engine.planner import Forecast, forecast
from models.policy import PolicySource
from stages import find_policy
from tests.benchmarks.engine_step import SETTINGS, roomy_budget, run_step, step_space
from tests.benchmarks.machine import heading, markdown, mib
from tests.helpers import random_group, tiny_config

MOST = 1.15
VOCABULARY, GROUP_SIZE, RESPONSE_TOKENS = 256, 4, 64
FORGET_EVERY_S = 0.05
# A chunk is used again in the next stage at the earliest, after half a second.
RESIDENT, DISK = "resident", "disk"


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, a prompt length and the choices for them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    prompt_tokens: int
    chunk_tokens: int

    @property
    def choices(self) -> dict[str, int]:
        return {**CHOICES, "chunk_tokens": self.chunk_tokens}


CHOICES = {"branches_at_once": GROUP_SIZE, "head_rows": 64, "stored_inputs": 0, "page_tokens": 512}
WORKS = (
    Work(num_layers=4, hidden_size=256, num_heads=4, head_dim=64, prompt_tokens=4096, chunk_tokens=1024),
    Work(num_layers=2, hidden_size=128, num_heads=8, head_dim=128, prompt_tokens=2048, chunk_tokens=64),
)
# State takes 8 and 16 KiB a token. A piece of it is used by a chunk's tokens: 1024 or 64 of them.


@dataclass(kw_only=True)
class Way:
    """One work with its state in one place. ``read_bytes`` came from the disk and not from the page cache.

    ``cpu_s`` are the processor's seconds of a whole run, loading and journal included.
    """

    name: str
    planned: Forecast
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    checksums: set[int] = field(default_factory=set)
    read_bytes: int = 0
    disk_bytes: int = 0

    @property
    def simulated_s(self) -> float:
        """What the simulator says of the stages that are timed: all but the one that loads the weights."""
        load_s = sum(s for name, s in self.planned.stage_s.items() if self.planned.plan.stages[name].kind == "load")
        return self.planned.makespan_s - load_s

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def turn(self, folder: Path) -> None:
        """Do the work once."""
        before_bytes, before_s = bytes_from_disk(), time.process_time()
        step = run_step(self.planned, folder)
        self.cpu_s.append(time.process_time() - before_s)
        self.seconds.append(step.seconds)
        self.checksums.add(step.grad_crc32c)
        self.read_bytes = bytes_from_disk() - before_bytes
        self.disk_bytes = step.peak_bytes(Tier.DISK)


def random_policy(work: Work) -> PolicySource:
    """Return a llama with random weights, whose attention has as many heads for keys as for queries."""
    config = tiny_config(
        vocab_size=VOCABULARY,
        hidden_size=work.hidden_size,
        intermediate_size=2 * work.hidden_size,
        num_hidden_layers=work.num_layers,
        num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_heads,
        head_dim=work.head_dim,
        max_position_embeddings=work.prompt_tokens + RESPONSE_TOKENS,
    )
    return find_policy(config)


def ways_of(work: Work, hardware: str) -> list[Way]:
    """Return the work with its state on the device and with it on the disk."""
    policy, ways = random_policy(work), []
    group = random_group(0, work.prompt_tokens, [RESPONSE_TOKENS] * GROUP_SIZE, VOCABULARY)
    for name, tier in ((RESIDENT, Tier.DEVICE), (DISK, Tier.DISK)):
        space = step_space(policy, group, work.choices, replace(SETTINGS, state_tier=str(tier)))
        planned = forecast(space.lower(space.first()), roomy_budget(), load_profile(hardware))
        ways.append(Way(name=name, planned=planned))
    return ways


def bytes_from_disk() -> int:
    """Return the bytes that the disk has been read for by this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@contextmanager
def page_cache_forgotten(folder: Path) -> Iterator[None]:
    """Keep the page cache clear of chunk files under ``folder``, from another process.

    That one imports as good as nothing and is ready before the first step begins: it must not take the core that
    carries pieces.
    """
    command = [sys.executable, "-S", "-c", _FORGET, str(folder), str(FORGET_EVERY_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            failed = process.poll() is not None
            process.kill()
    if failed:
        raise SystemExit("the process that keeps the page cache clear has failed; no figure counts")


_FORGET = """
import os, sys, time
on_disk = {}  # when each file was last changed that is on the disk: syncing it again is a flush
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(float(sys.argv[2]))
    for inside, _, names in os.walk(sys.argv[1]):
        for name in names:
            if name.startswith("c."):
                path = inside + "/" + name
                try:
                    fd = os.open(path, os.O_RDONLY)
                except FileNotFoundError:  # dropped meanwhile
                    continue
                changed_ns = os.fstat(fd).st_mtime_ns
                if on_disk.get(path) != changed_ns:
                    os.fdatasync(fd)
                    on_disk[path] = changed_ns
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
"""


def measure(work: Work, rounds: int, folder: Path, hardware: str) -> list[Way]:
    """Let both ways take turns, after one turn each that is not counted."""
    ways = ways_of(work, hardware)
    with page_cache_forgotten(folder):
        for number in range(rounds + 1):
            for way in ways if number % 2 else reversed(ways):
                way.turn(folder)
                print(f"{work.prompt_tokens} tokens, {way.name}: {way.seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    for way in ways:
        del way.seconds[0], way.cpu_s[0]
    return ways


def verdict(ways: Sequence[Way]) -> str:
    """Return what is wrong with what was measured, or nothing."""
    resident, disk = ways
    if len(resident.checksums | disk.checksums) != 1:
        return "gradients differ"
    if disk.planned.bound == "arithmetic" and disk.median_s > MOST * resident.median_s:
        return f"more than {MOST} times the resident step"
    return ""


def row(work: Work, ways: Sequence[Way]) -> list[str]:
    """Return one line of the table."""
    resident, disk = ways
    return [
        f"{work.num_layers} of {work.hidden_size}, {work.num_heads} heads of {work.head_dim}",
        f"{work.prompt_tokens:,}",
        f"{work.chunk_tokens:,}",
        mib(disk.disk_bytes),
        mib(disk.read_bytes),
        f"{resident.median_s:.2f}",
        f"{disk.median_s:.2f}",
        f"{disk.median_s / resident.median_s:.2f}",
        f"{statistics.median(disk.cpu_s) / statistics.median(resident.cpu_s):.2f}",
        f"{disk.simulated_s / resident.simulated_s:.2f}",
        disk.planned.bound,
        verdict(ways) or "equal bits",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a gradient or a time is not what it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that compute")
    parser.add_argument("--hardware", default="cpu", help="the profile that the simulator has")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    started_s, rows, bad = time.perf_counter(), [], False
    for work in WORKS:
        with tempfile.TemporaryDirectory(prefix="longstraw-disk-", dir=options.folder) as folder:
            ways = measure(work, options.rounds, Path(folder), options.hardware)
        rows.append(row(work, ways))
        bad = bad or bool(verdict(ways))
    header = [
        "layers", "prompt tokens", "chunk tokens", "on disk MiB", "read from disk MiB", "resident s", "disk s", "ratio",
        "ratio of CPU s", "simulated ratio", "bound, simulated", "gradients",
    ]  # fmt: skip
    work_text = f"llamas of random weights, float32; {GROUP_SIZE} responses of {RESPONSE_TOKENS} tokens; {CHOICES}"
    print(f"{heading(work_text)}\n\n{markdown(header, rows)}\n")
    print(f"medians of {options.rounds} rounds, {time.perf_counter() - started_s:.0f} s in all")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
