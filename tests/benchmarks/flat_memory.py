"""Memory over prompt length, measured: one device budget, one host budget, the same choices, the exact gradient.

    python -m tests.benchmarks.flat_memory
    python -m tests.benchmarks.flat_memory --tokens 8192 32768
    python -m tests.benchmarks.flat_memory --tokens 1048576

A small llama with random weights on random tokens, small so that attention over 256K tokens takes minutes and not days
on a CPU. Both of its layers have attention. The device budget is the smallest that the planner states for the first
length, the host budget is less than what the first length's state takes, and both are kept for all lengths: what a
longer prompt needs more must go to disk. Each length runs in a process of its own, so that its resident set is its own.

The device's bytes are measured beyond weights and gradients. The script fails if they differ by more than 1 % between
lengths, or resident sets by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.budget import Budget
from engine.units import KIB, format_bytes
from models.policy import PolicySource
from stages import GrpoSpace, find_policy
from tests.benchmarks.engine_step import fixed_bytes, plan_step, roomy_budget, run_step, step_space
from tests.benchmarks.machine import heading, markdown, mib
from tests.helpers import random_group, tiny_config

TOKENS = (8192, 32768, 131072, 262144)
GROUP_SIZE, RESPONSE_TOKENS = 4, 32
VOCABULARY = 64
CHOICES = {"chunk_tokens": 2048, "branches_at_once": GROUP_SIZE, "head_rows": 64, "page_tokens": 512}
HOST_BYTES = 2560 * KIB
# State and cotangents take 512 bytes a token: 4 MiB for 8K tokens.

DEVICE_TOLERANCE, RSS_TOLERANCE = 0.01, 0.05


@dataclass(frozen=True, kw_only=True)
class Length:
    """What one prompt length took; device bytes are beyond weights and gradients."""

    prompt_tokens: int
    budget_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    rss_bytes: int
    seconds: float
    grad_norm: float


def small_policy() -> PolicySource:
    """Return a llama of two layers of hidden size 32 with one head of 16, which the CPU's kernel is fastest at."""
    config = tiny_config(
        vocab_size=VOCABULARY, intermediate_size=64, num_attention_heads=1, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=1 << 22,
    )  # fmt: skip
    return find_policy(config)


def space_of(prompt_tokens: int) -> GrpoSpace:
    """Return the plans of one length, under fixed choices."""
    group = random_group(0, prompt_tokens, [RESPONSE_TOKENS] * GROUP_SIZE, VOCABULARY)
    return step_space(small_policy(), group, CHOICES)


def measure(prompt_tokens: int, device_bytes: int) -> Length:
    """Run one length in this process."""
    roomy = roomy_budget()
    within = Budget(device_bytes=device_bytes, host_bytes=HOST_BYTES, disk_bytes=roomy.disk_bytes)
    planned = plan_step(space_of(prompt_tokens), within)
    step = run_step(planned)
    peak = step.outcome.measured_peak_bytes
    return Length(
        prompt_tokens=prompt_tokens,
        budget_bytes=device_bytes,
        device_bytes=peak["device"] - fixed_bytes(planned),
        host_bytes=peak["host"],
        disk_bytes=peak["disk"],
        rss_bytes=own_peak_rss_bytes(),
        seconds=step.seconds,
        grad_norm=step.grad_norm,
    )


def own_peak_rss_bytes() -> int:
    """Return this process's largest resident set; unlike getrusage's, it is not its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * KIB


def in_a_process(prompt_tokens: int, device_bytes: int) -> Length:
    """Run one length in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.flat_memory", "--child", str(prompt_tokens), str(device_bytes)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Length(**json.loads(done.stdout))


def table(lengths: Sequence[Length]) -> str:
    """Return what was measured, by length."""
    header = ["prompt tokens", "device MiB beyond", "host MiB", "disk MiB", "resident set MiB", "s", "gradient norm"]
    rows = [
        [
            f"{item.prompt_tokens:,}",
            f"{item.device_bytes / 2**20:.3f}",
            *map(mib, (item.host_bytes, item.disk_bytes, item.rss_bytes)),
            f"{item.seconds:.0f}",
            f"{item.grad_norm:.6g}",
        ]
        for item in lengths
    ]
    return markdown(header, rows)


def spread(numbers: Sequence[int]) -> float:
    """Return how much larger the largest is than the smallest."""
    return max(numbers) / min(numbers) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if memory was not flat."""
    parser = argparse.ArgumentParser(description="Memory over prompt length, measured.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="prompt lengths")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(asdict(measure(*options.child))))
        return 0
    device_bytes = plan_step(space_of(TOKENS[0]), roomy_budget()).smallest_device_bytes
    lengths = []
    for prompt_tokens in options.tokens:
        lengths.append(in_a_process(prompt_tokens, device_bytes))
        print(f"{prompt_tokens} tokens: {lengths[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    device_spread = spread([item.device_bytes for item in lengths])
    rss_spread = spread([item.rss_bytes for item in lengths])
    work = (
        f"llama of 2 layers, hidden size 32, random weights and tokens, float32; {GROUP_SIZE} responses of "
        f"{RESPONSE_TOKENS} tokens; {CHOICES}; budget: device {format_bytes(device_bytes)}, host "
        f"{format_bytes(HOST_BYTES)}"
    )
    print(f"{heading(work)}\n\n{table(lengths)}\n")
    print(f"Between lengths, device bytes differ by {device_spread:.2%}, resident sets by {rss_spread:.2%}.")
    return int(device_spread > DEVICE_TOLERANCE or rss_spread > RSS_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
