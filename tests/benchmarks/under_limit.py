"""A long prompt under a limit of memory that is enforced from outside: the engine ends, dense autograd is killed.

    python -m tests.benchmarks.under_limit
    python -m tests.benchmarks.under_limit --tokens 8192 --limit 2GiB --device 1216MiB --host 64MiB

SmolLM2-135M in float32 on real text, 8 responses of 64 tokens, the exact gradient, no optimizer. Each side runs in a
process of its own under the same limit (`tests.benchmarks.memory_limit`), which holds Python and torch too, about
0.4 GiB. Dense autograd is as lean as we can make it: one sequence at a time, every layer checkpointed, head in blocks
of rows, the C allocator set to return memory at once as it is for the engine. It has the longest sequence to run, and
is told to stop after that one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from engine.budget import Budget
from engine.memory import keep_freed_memory
from engine.units import format_bytes, parse_bytes
from tests.benchmarks.engine_step import plan_step, roomy_budget, run_step, step_space
from tests.benchmarks.machine import heading, markdown, mib
from tests.benchmarks.memory_limit import Ended, run_limited
from tests.benchmarks.step_against_alternatives import DENSE, benchmark_group, benchmark_policy, peer

TOKENS, GROUP_SIZE = 32768, 8
LIMIT, DEVICE, HOST = "3GiB", "1600MiB", "512MiB"
# What is left of the limit, 0.9 GiB, is for Python, torch, the plan, and what kernels allocate inside.


def engine(tokens: int, device_bytes: int, host_bytes: int) -> dict[str, object]:
    """Run the engine's step in this process and return its figures."""
    within = Budget(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=roomy_budget().disk_bytes)
    planned = plan_step(step_space(benchmark_policy(), benchmark_group(tokens, GROUP_SIZE)), within)
    step = run_step(planned)
    return {
        "choices": dict(planned.plan.choices),
        "peak_bytes": step.outcome.measured_peak_bytes,
        "grad_norm": step.grad_norm,
        "seconds": step.seconds,
    }


def dense(tokens: int) -> dict[str, object]:
    """Run dense autograd of one sequence in this process."""
    keep_freed_memory()
    group = benchmark_group(tokens, GROUP_SIZE)
    peer(DENSE, replace(group, responses=group.responses[:1])).step()
    return {}


def child(side: str, options: argparse.Namespace) -> Ended:
    """Run one side under the limit."""
    command = [sys.executable, "-m", "tests.benchmarks.under_limit", "--child", side]
    for name in ("tokens", "limit", "device", "host"):
        command += [f"--{name}", str(getattr(options, name))]
    return run_limited(command, parse_bytes(options.limit))


def row(side: str, ended: Ended) -> list[str]:
    """Return a side's row of the table."""
    how = "killed" if ended.killed else f"ended with {ended.return_code}"
    figures = json.loads(ended.output) if ended.output.strip() else {}
    peaks = [
        mib(figures["peak_bytes"][tier]) if figures.get("peak_bytes") else "-" for tier in ("device", "host", "disk")
    ]
    norm = f"{figures['grad_norm']:.6f}" if figures.get("grad_norm") else "-"
    return [side, how, mib(ended.rss_bytes), *peaks, norm, f"{ended.seconds:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides and print; 0 if the engine ended well and dense autograd was killed."""
    parser = argparse.ArgumentParser(description="A long prompt under an enforced limit of memory.")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N")
    parser.add_argument("--limit", default=LIMIT, metavar="SIZE", help="of the whole process")
    parser.add_argument("--device", default=DEVICE, metavar="SIZE", help="the engine's device budget")
    parser.add_argument("--host", default=HOST, metavar="SIZE", help="the engine's host budget")
    parser.add_argument("--child", choices=("engine", "dense"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child == "dense":
        print(json.dumps(dense(options.tokens)))
        return 0
    if options.child == "engine":
        print(json.dumps(engine(options.tokens, parse_bytes(options.device), parse_bytes(options.host))))
        return 0
    sides = {side: child(side, options) for side in ("dense", "engine")}
    work = (
        f"SmolLM2-135M, float32, {options.tokens:,} prompt tokens, {GROUP_SIZE} responses of 64, limit "
        f"{format_bytes(parse_bytes(options.limit))} held by a {sides['engine'].held_by}; budget: device "
        f"{options.device}, host {options.host}"
    )
    header = ["side", "end", "resident set MiB", "device MiB", "host MiB", "disk MiB", "gradient norm", "s in all"]
    print(f"{heading(work)}\n\n{markdown(header, [row(side, ended) for side, ended in sides.items()])}")
    for side, ended in sides.items():
        if ended.return_code and not ended.killed:
            print(f"\n{side}:\n{ended.errors[-4000:]}", file=sys.stderr)
    return int(sides["engine"].return_code != 0 or not sides["dense"].killed)


if __name__ == "__main__":
    sys.exit(main())
