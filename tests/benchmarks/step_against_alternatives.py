"""One exact GRPO step against dense autograd and against one packed sequence: bytes and time, side by side.

    python -m tests.benchmarks.step_against_alternatives --quick
    python -m tests.benchmarks.step_against_alternatives
    python -m tests.benchmarks.step_against_alternatives --quick --no-dense --share 1 --shares-only --set head_rows=64

The work is one group of SmolLM2-135M in float32 on real text: a prompt, 8 responses of 64 tokens with given advantages,
forward and backward, no optimizer. The ways of it take turns: dense autograd, one packed sequence
(`tests.benchmarks.peers`), the engine within shares of what the packed step needs, within the smallest budget that its
planner states, and within the machine's default. Their gradients' norms are held against each other.

Bytes are live tensor storages beyond weights and gradients at the peak, counted by the same counter for all. The
engine's include the second accumulator that a tied embedding needs, and what it holds on host and disk has columns of
its own. Time is the median over rounds. The engine is timed with its counter and journal on; the peers are timed
without a counter, in a process of their own with the C allocator as it comes, since the engine sets it to return
memory at once, which costs time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from engine.errors import DoesNotFitError
from engine.memory import DEVICE, LiveBytes
from models.policy import PolicySource
from plans.quickstart_data import documentation_prompt
from plans.smollm2 import checkpoint_directory
from stages import Group, find_policy, parse_group
from tests.benchmarks.engine_step import fixed_bytes, norm_of, plan_step, roomy_budget, run_step, step_space
from tests.benchmarks.machine import heading, machine, markdown, mib
from tests.benchmarks.peers import Dense, Packed, Peer, load_peer_model
from tests.benchmarks.profiled import time_spent

PROMPT_TOKENS = (2048, 4096)
RESPONSE_TOKENS = 64
SHARES = (1.0, 0.5)
HEAD_ROWS = 64
# The packed step's peak is in a layer's backward from here down; more rows at once would only raise it.

NORM_TOLERANCE = 1e-4
DENSE, PACKED = "dense", "packed"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One repetition: bytes are beyond weights and gradients; ``kinds_s`` and ``choices`` are the engine's."""

    seconds: float
    grad_norm: float
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Way:
    """One way of doing the work and what was measured of it. ``limit_bytes`` is the engine's device budget."""

    name: str
    prompt_tokens: int
    limit_bytes: int | None = None
    refused: str | None = None
    rounds: list[Measured] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(item.seconds for item in self.rounds)


# In the processes that do the work


@cache
def benchmark_policy() -> PolicySource:
    return find_policy(str(checkpoint_directory()))


@cache
def benchmark_group(prompt_tokens: int, group_size: int) -> Group:
    """Return a prompt of the documentation; the responses are pieces of the text that follows in it."""
    tokenizer = benchmark_policy().tokenizer()
    assert tokenizer is not None
    count = group_size * RESPONSE_TOKENS
    text = documentation_prompt(tokenizer, prompt_tokens + 2 * count)[prompt_tokens : prompt_tokens + count]
    record = {
        "prompt": documentation_prompt(tokenizer, prompt_tokens),
        "responses": [text[first : first + RESPONSE_TOKENS] for first in range(0, count, RESPONSE_TOKENS)],
        "advantages": advantages(group_size),
    }
    return parse_group(record, where="benchmark", tokenizer=tokenizer, vocab_size=benchmark_policy().config.vocab_size)


def advantages(group_size: int) -> list[float]:
    """Return one number a response: from -1.5 to 1.5, in equal steps."""
    return [3 * (index + 0.5) / group_size - 1.5 for index in range(group_size)]


@cache
def _peer_model() -> Any:
    return load_peer_model(str(checkpoint_directory()))


def peer(name: str, group: Group) -> Peer:
    """Return a peer by name, for a group of `benchmark_group`."""
    numbers = advantages(len(group.responses))
    kind = Dense if name == DENSE else Packed
    return kind(hf=_peer_model(), group=group, advantages=numbers, head_rows=HEAD_ROWS)


def peer_bytes(name: str, prompt_tokens: int, group_size: int) -> int:
    """Return a peer's device peak beyond weights and gradients. Dense sequences are alike: one of them is run."""
    group = benchmark_group(prompt_tokens, group_size)
    if name == DENSE:
        group = replace(group, responses=group.responses[:1])
    hf = _peer_model()
    with LiveBytes() as meter:
        meter.adopt([*hf.parameters(), *hf.buffers(), *(parameter.grad for parameter in hf.parameters())])
        before_bytes = meter.live[DEVICE]
        meter.restart_peak()
        peer(name, group).step()
        return int(meter.peak[DEVICE] - before_bytes)


def peer_step(name: str, prompt_tokens: int, group_size: int) -> Measured:
    """Time a peer once."""
    way, parameters = peer(name, benchmark_group(prompt_tokens, group_size)), list(_peer_model().parameters())
    for parameter in parameters:
        parameter.grad.zero_()
    started_s = time.perf_counter()
    way.step()
    seconds = time.perf_counter() - started_s
    return Measured(seconds=seconds, grad_norm=norm_of(parameter.grad for parameter in parameters))


def engine_bytes(prompt_tokens: int, group_size: int, fixed: Mapping[str, int]) -> tuple[int, int]:
    """Return the bytes of weights and gradients, and the smallest device budget."""
    space = step_space(benchmark_policy(), benchmark_group(prompt_tokens, group_size), fixed)
    planned = plan_step(space, roomy_budget())
    return fixed_bytes(planned), planned.smallest_device_bytes


def engine_step(prompt_tokens: int, group_size: int, fixed: Mapping[str, int], limit_bytes: int | None) -> Measured:
    """Run the engine's step once. Raises DoesNotFitError where the device budget is too small."""
    space = step_space(benchmark_policy(), benchmark_group(prompt_tokens, group_size), fixed)
    planned = plan_step(space, roomy_budget(limit_bytes))
    step = run_step(planned)
    peak = step.outcome.measured_peak_bytes
    return Measured(
        seconds=step.seconds,
        grad_norm=step.grad_norm,
        device_bytes=peak["device"] - fixed_bytes(planned),
        host_bytes=peak["host"],
        disk_bytes=peak["disk"],
        kinds_s=dict(step.kinds_s),
        choices=dict(planned.plan.choices),
    )


def engine_time_spent(
    prompt_tokens: int, group_size: int, fixed: Mapping[str, int], limit_bytes: int | None
) -> dict[str, float]:
    """Run the engine's step once under torch's profiler and return its seconds by where they went."""
    space = step_space(benchmark_policy(), benchmark_group(prompt_tokens, group_size), fixed)
    planned = plan_step(space, roomy_budget(limit_bytes))
    return time_spent(lambda: run_step(planned))


# In the process that asks for it


def process() -> ProcessPoolExecutor:
    """Return a process of its own for one side."""
    return ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))


@dataclass(kw_only=True)
class Bench:
    """What is measured, and the two processes that do it."""

    options: argparse.Namespace
    peers: ProcessPoolExecutor
    engine: ProcessPoolExecutor

    def ways(self, prompt_tokens: int) -> list[Way]:
        """Return the ways of one prompt length, with the engine's budgets."""
        group_size = self.options.group_size
        names = [PACKED] if self.options.no_dense else [DENSE, PACKED]
        self._peer_bytes = {
            name: self.peers.submit(peer_bytes, name, prompt_tokens, group_size).result() for name in names
        }
        packed_bytes = self._peer_bytes[PACKED]
        say(f"{prompt_tokens} tokens: packed needs {mib(packed_bytes)} MiB beyond weights and gradients")
        base_bytes, smallest_bytes = self.engine.submit(
            engine_bytes, prompt_tokens, group_size, self.options.fixed
        ).result()
        limits: dict[str, int | None] = {
            f"engine, {share:g} of packed's bytes": base_bytes + int(share * packed_bytes)
            for share in self.options.share
        }
        if not self.options.shares_only:
            limits |= {"engine, smallest budget": smallest_bytes, "engine, default budget": None}
        found = [Way(name=name, prompt_tokens=prompt_tokens) for name in names]
        return found + [
            Way(name=name, prompt_tokens=prompt_tokens, limit_bytes=limit) for name, limit in limits.items()
        ]

    def turn(self, way: Way) -> str:
        """Do the work once in one way and say how it went."""
        group_size, name = self.options.group_size, way.name
        try:
            if name in (DENSE, PACKED):
                found = self.peers.submit(peer_step, name, way.prompt_tokens, group_size).result()
                found = replace(found, device_bytes=self._peer_bytes[name])
            else:
                fixed, limit = self.options.fixed, way.limit_bytes
                found = self.engine.submit(engine_step, way.prompt_tokens, group_size, fixed, limit).result()
        except DoesNotFitError as error:
            way.refused = str(error)
            return way.refused
        way.rounds.append(found)
        return f"{found.seconds:.1f} s {found.choices or ''}"

    def measure(self, prompt_tokens: int) -> list[Way]:
        """Let all ways of one prompt length take turns."""
        ways = self.ways(prompt_tokens)
        for turn in range(self.options.rounds):
            for way in ways:
                if way.refused or (way.name == DENSE and turn >= self.options.dense_rounds):
                    continue
                say(f"{prompt_tokens} tokens, round {turn + 1}: {way.name}: {self.turn(way)}")
        check_norms(ways)
        return ways

    def profile(self, ways: Sequence[Way]) -> str:
        """Return where the time of the engine's first way goes, as a table."""
        way = next(way for way in ways if way.name not in (DENSE, PACKED) and way.rounds)
        asked = (way.prompt_tokens, self.options.group_size, self.options.fixed, way.limit_bytes)
        spent = self.engine.submit(engine_time_spent, *asked).result()
        total_s = sum(spent.values())
        rows = [[kind, f"{seconds:.2f}", f"{seconds / total_s:.0%}"] for kind, seconds in spent.items()]
        return markdown([f"{way.name}, {way.prompt_tokens} tokens, profiled", "s", "share"], rows)


def check_norms(ways: Sequence[Way]) -> None:
    """Stop if the gradients' norms of one prompt length do not agree."""
    norms = [item.grad_norm for way in ways for item in way.rounds]
    if not all(math.isclose(norm, norms[0], rel_tol=NORM_TOLERANCE) for norm in norms):
        raise SystemExit(f"the ways' gradients differ by more than {NORM_TOLERANCE}: norms {norms}")


def table(ways: Sequence[Way]) -> str:
    """Return the figures of all ways that ran, times relative to those of the packed sequence."""
    packed_s = {way.prompt_tokens: way.seconds for way in ways if way.name == PACKED}
    rows = [
        [
            way.prompt_tokens,
            way.name,
            *(mib(getattr(way.rounds[0], f"{tier}_bytes")) for tier in ("device", "host", "disk")),
            f"{way.seconds:.1f}",
            f"{way.seconds / packed_s[way.prompt_tokens]:.2f}",
            f"{way.rounds[0].grad_norm:.6f}",
        ]
        for way in ways
        if way.rounds
    ]
    header = ["prompt tokens", "way", "device MiB beyond", "host MiB", "disk MiB", "s", "s / packed", "gradient norm"]
    return markdown(header, rows)


def stage_table(ways: Sequence[Way]) -> str:
    """Return the engine's seconds by kind of stage, of the last round."""
    found = [way for way in ways if way.rounds and way.rounds[-1].kinds_s]
    kinds = list(dict.fromkeys(kind for way in found for kind in way.rounds[-1].kinds_s))
    rows = []
    for way in found:
        last = way.rounds[-1]
        between_s = last.seconds - sum(last.kinds_s.values())
        seconds = [f"{last.kinds_s.get(kind, 0.0):.2f}" for kind in kinds]
        rows.append([way.prompt_tokens, way.name, *seconds, f"{between_s:.2f}", str(dict(last.choices))])
    return markdown(["prompt tokens", "way", *kinds, "between stages", "choices"], rows)


def say(text: str) -> None:
    """Tell on standard error how far things are."""
    print(text, file=sys.stderr, flush=True)


def choice(text: str) -> tuple[str, int]:
    """Return the name and the number of a ``name=value``."""
    name, _, value = text.partition("=")
    return name, int(value)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="One exact GRPO step against dense autograd and a packed sequence.")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS, metavar="N")
    parser.add_argument("--group-size", type=int, default=8, metavar="G")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each way is timed")
    parser.add_argument("--dense-rounds", type=int, default=1, metavar="N", help="how often dense is")
    parser.add_argument("--share", type=float, nargs="+", default=SHARES, metavar="X", help="of packed's bytes")
    parser.add_argument("--shares-only", action="store_true", help="no other budgets")
    parser.add_argument("--no-dense", action="store_true")
    parser.add_argument("--set", type=choice, action="append", default=[], metavar="NAME=N", help="fix a choice")
    parser.add_argument("--profile", action="store_true", help="say where the time of the engine's first way goes")
    parser.add_argument("--quick", action="store_true", help="one round at the first prompt length")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.prompt_tokens = 1, options.prompt_tokens[:1]
    options.fixed = dict(options.set)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print: tables, then everything as one line of JSON."""
    options = parse(arguments)
    ways: list[Way] = []
    profiles: list[str] = []
    with process() as peers, process() as engine:
        bench = Bench(options=options, peers=peers, engine=engine)
        for prompt_tokens in options.prompt_tokens:
            found = bench.measure(prompt_tokens)
            ways += found
            if options.profile:
                profiles.append(bench.profile(found))
    work = (
        f"SmolLM2-135M, float32, one group of {options.group_size} responses of {RESPONSE_TOKENS} tokens, forward and "
        f"backward, median of {options.rounds} interleaved rounds"
    )
    print(f"{heading(work)}\n\n{table(ways)}\n\n{stage_table(ways)}\n")
    print("".join(f"{text}\n\n" for text in profiles), end="")
    print(json.dumps({**machine(), "ways": [asdict(way) for way in ways]}))


if __name__ == "__main__":
    main()
