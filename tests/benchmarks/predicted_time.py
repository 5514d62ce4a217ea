"""Simulated against measured time, on plans that no calibration used.

    python -m tests.benchmarks.predicted_time [--calibration FILE] [--only WORD]

Without ``--calibration`` the machine is calibrated first. Every plan is executed ``--rounds`` times, and the median
counts, from the end of the load stage to the end of the last one: how long weights take to load depends on whether
they are in the operating system's cache. Run it on an idle machine: with fewer cores than threads every figure is
several times too long. On a busy one, ``--processor-time`` with OMP_NUM_THREADS=1 says whether work is priced right:
one thread's processor time is what it would take alone, but for waiting (for the disk, or for another thread).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.budget import UNLIMITED_BYTES, Budget
from engine.calibrate import Clock, calibrate
from engine.hardware import HardwareProfile, load_profile
from engine.loader import find_plan
from engine.planner import Forecast, forecast
from engine.report import table
from engine.runtime import execute
from engine.schedule import staging_need
from engine.trace import MEASURED as MEASURED_TIMES
from engine.trace import Recording

ROOM = Budget(device_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
SPARE = 1.05
# A tight device budget in units of the smallest: enough for two buffers a stream.


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan with its settings. ``pages`` says where what does not fit may go: nowhere, to host, or to disk."""

    plan: str
    settings: Mapping[str, str]
    pages: str = "device"

    @property
    def name(self) -> str:
        return " ".join([self.plan, *(f"{key}={value}" for key, value in self.settings.items())])


def _case(plan: str, *, pages: str = "device", **settings: int | str) -> Case:
    return Case(plan=plan, pages=pages, settings={key: str(value) for key, value in settings.items()})


def _smollm2(*, pages: str = "device", **settings: int) -> Case:
    """Return a case of SmolLM2-135M's sizes, with random weights."""
    return _case("calibration", pages=pages, hidden=576, layers=30, vocabulary=49152, **settings)


CASES = (
    _case("tiny_dense", prompt_tokens=600),
    _case("tiny_dense", prompt_tokens=4000, chunk_tokens=256, group_size=8),
    _case("tiny_dense", prompt_tokens=3000, chunk_tokens=64, branches_at_once=2),
    _case("tiny_dense", prompt_tokens=6000, chunk_tokens=512, pages="host"),
    _case("tiny_dense", prompt_tokens=6000, chunk_tokens=512, pages="disk"),
    _case("calibration", hidden=384, layers=5, prompt_tokens=2500, chunk_tokens=1024, group_size=6),
    _case("calibration", hidden=384, layers=5, prompt_tokens=2500, chunk_tokens=192, branches_at_once=1),
    _case("calibration", hidden=384, layers=5, prompt_tokens=6000, chunk_tokens=512, pages="host"),
    _case("calibration", hidden=384, layers=5, prompt_tokens=6000, chunk_tokens=512, pages="disk"),
    _smollm2(prompt_tokens=1024, chunk_tokens=1024),
    _smollm2(prompt_tokens=1500, chunk_tokens=256, group_size=2, pages="host"),
    _smollm2(prompt_tokens=512, chunk_tokens=128, response_tokens=96, pages="disk"),
    _case("quickstart", prompt_tokens=768, group_size=2, max_response_tokens=24, compare_dense="false"),
)


def plan_within(case: Case, profile: HardwareProfile) -> Forecast:
    """Return the forecast of a case in its budget.

    Where everything rests on disk, the host holds the buffer between disk and device alone.
    """
    plan = find_plan(case.plan).plan(case.settings)
    roomy = forecast(plan, ROOM, profile)
    if case.pages == "device":
        return roomy
    tight = replace(ROOM, device_bytes=int(SPARE * roomy.smallest_device_bytes))
    on_host = forecast(plan, tight, profile)
    if case.pages == "host":
        return on_host
    return forecast(plan, replace(tight, host_bytes=staging_need(on_host.plan)), profile)


def seconds_after_load(recording: Recording) -> float:
    """Return the time from the end of the load stage to the end of the last span."""
    loaded_s = max(span.end_s for span in recording.spans if span.kind == "load")
    return max(span.end_s for span in recording.spans) - loaded_s


def measure(planned: Forecast, rounds: int, clock: Clock) -> float:
    """Return the median time of several runs."""
    taken = []
    for _ in range(rounds):
        recording = Recording(planned.plan, planned.budget, process=MEASURED_TIMES, clock=clock)
        with tempfile.TemporaryDirectory(prefix="longstraw-bench-") as folder:
            execute(planned, Path(folder) / "run", recording=recording)
        taken.append(seconds_after_load(recording))
    return statistics.median(taken)


def calibrated(clock: Clock) -> HardwareProfile:
    """Return the profile of this machine, measured now."""
    file = find_plan("calibration")
    plans = [partial(file.plan, settings) for settings in file.measured]
    found = calibrate("here", plans, tell=lambda text: print(text, file=sys.stderr), clock=clock)
    print(found.describe(), file=sys.stderr)
    return found.profile


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Simulated against measured time.")
    parser.add_argument("--calibration", metavar="FILE.json", help="a profile that engine calibrate wrote")
    parser.add_argument("--only", metavar="WORD", default="", help="only plans with this word in their name")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each plan is executed")
    parser.add_argument("--processor-time", action="store_true", help="measure processor time; see above")
    options = parser.parse_args(arguments)
    clock = time.process_time if options.processor_time else time.perf_counter
    profile = load_profile(options.calibration) if options.calibration else calibrated(clock)
    rows, off = [], []
    for case in CASES:
        if options.only in f"{case.name} {case.pages}":
            planned = plan_within(case, profile)
            simulated_s = seconds_after_load(planned.recording)
            measured_s = measure(planned, options.rounds, clock)
            off.append(abs(simulated_s / measured_s - 1.0))
            rows.append(
                [case.name, case.pages, f"{simulated_s:.2f}", f"{measured_s:.2f}", f"{simulated_s / measured_s:.2f}"]
            )
            print(*rows[-1], sep="  ", file=sys.stderr)
    print(f"{torch.get_num_threads()} threads, profile {profile.name}, {clock.__name__}\n")
    print(table(["plan", "rest on", "simulated s", "measured s", "ratio"], rows, text=(0, 1)))
    print(f"\nworst {100 * max(off):.0f} %, median {100 * statistics.median(off):.0f} %")


if __name__ == "__main__":
    main()
