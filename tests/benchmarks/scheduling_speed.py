"""How long it takes to schedule and to simulate plans of many stages.

    python -m tests.benchmarks.scheduling_speed [--stages N ...] [--streamed N]

A synthetic plan has chains of stages with everything that schedules are made of: each stage reads what the one before
wrote, something that was written long before, and weights; adds to an accumulator; streams through ``--streamed``
Values, and changes one of them. The budget is a third of the way from the least device bytes to everything. Scheduled
means from a plan that was just built, checks and order included, to its instructions; a whole forecast has the clock,
the ledger and the recording as well.
Seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.budget import UNLIMITED_BYTES, Budget
from engine.hardware import PROFILES, HardwareProfile
from engine.needs import needs_of
from engine.plan import Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.planner import collector_paused, forecast
from engine.schedule import make_schedule
from engine.units import KIB, MIB
from tests.benchmarks.machine import heading, markdown

REACH = 500
# Stages over which something is remembered.


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def synthetic_plan(num_stages: int, num_streamed: int) -> Plan:
    """Return a plan with residents that live long and short, and a stream of ``num_streamed`` Values a stage."""
    plan = Plan(name=f"synthetic-{num_stages}")

    def value(name: str, nbytes: int, kind: ValueKind = ValueKind.IMMUTABLE, num_pieces: int = 1) -> str:
        spec = TensorSpec(shape=(num_pieces, nbytes // num_pieces), dtype="uint8")
        plan.value(Value(name=name, tensors={"t": spec}, kind=kind))
        return name

    weights, total = value("weights", 64 * MIB), value("total", 64 * MIB, ValueKind.ACCUMULATOR)
    plan.add(Stage(name="load", kind="load", run=nothing, writes=(weights,)))
    pages: list[str] = []
    for index in range(num_stages - 1):
        pages.append(value(f"pages{index}", MIB, ValueKind.ORDERED, num_pieces=4))
        made = value(f"v{index}", (64 + index % 7 * 32) * KIB)
        reads = [weights] + ([f"v{index - 1}"] if index else []) + ([f"v{index - REACH}"] if index > REACH else [])
        before = pages[-1 - num_streamed : -1]
        streams = [Stream(values=(pages[-1],), updates=True, buffered=False)]
        streams += [Stream(values=tuple(before))] if before else []
        plan.add(
            Stage(
                name=f"s{index}", kind="work", run=nothing, reads=tuple(reads), writes=(made,), updates=(total,),
                streams=tuple(streams), workspace_bytes=MIB, cost=Cost(flops=3e8, num_kernels=40),
            )
        )  # fmt: skip
    return plan


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def measured(build: Callable[[], Plan], profile: HardwareProfile) -> list[str]:
    """Return a row of the table for the plans that ``build`` makes; each timing has a plan of its own."""
    plan = build()
    stages = plan.ordered()
    needs = needs_of(plan, stages)
    device_bytes = (2 * needs.floor[0] + needs.everything_bytes) // 3
    del needs
    budget = Budget(device_bytes=device_bytes, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    fresh = build()
    with collector_paused():
        _, schedule_s = timed(lambda: make_schedule(fresh, budget, profile))
    fresh = build()
    made, together_s = timed(lambda: forecast(fresh, budget, profile))
    num_uses = sum(len(set(stage.used)) for stage in stages)
    return [
        f"{len(stages):,}", f"{len(plan.values):,}", f"{num_uses:,}", f"{len(made.schedule.instructions):,}",
        f"{schedule_s:.2f}", f"{together_s:.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--streamed", type=int, default=20, help="Values that a stage streams through")
    arguments = parser.parse_args()
    rows = [measured(partial(synthetic_plan, num, arguments.streamed), PROFILES["cpu"]) for num in arguments.stages]
    print(heading("profile cpu; processor time of one thread"))
    print(markdown(["stages", "Values", "uses", "instructions", "scheduled s", "scheduled and simulated s"], rows))


if __name__ == "__main__":
    main()
