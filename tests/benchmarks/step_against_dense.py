"""One exact GRPO step against dense autograd: device bytes and time, side by side.

    python tests/benchmarks/step_against_dense.py
    python tests/benchmarks/step_against_dense.py --prompt-tokens 512 --rounds 1

The work is one group of SmolLM2-135M in float32 on real text, from loaded weights to merged gradients: no optimizer,
no checkpoint. Three ways of it take turns: the engine under the machine's default budget, the engine under the
smallest device budget that its planner states, and dense autograd of Hugging Face's own model with every layer
checkpointed, one sequence at a time.

Bytes are live tensor storages beyond weights and gradients, counted by the same counter for all three; the engine's
include the second accumulator that a tied embedding needs. Time is the median over rounds. The engine is timed with
its counter and journal on, as it always runs; dense autograd is timed without the counter and without a forward for
the loss, whose derivatives need none where every ratio is 1.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from engine import Budget, Tier, __version__
from engine.budget import default_budget
from engine.hardware import load_profile
from engine.plan import Stage
from engine.planner import forecast
from engine.runtime import execute
from engine.units import MIB
from models.policy import PolicySource
from plans.quickstart_data import quickstart_group
from plans.smollm2 import checkpoint_directory
from stages import Group, GrpoSettings, GrpoSpace, find_policy, names, parse_group
from stages.advantages import group_advantages
from stages.dense import dense_model, dense_peak_bytes, scores, sequences
from stages.losses import evaluate_loss, make_batch

SETTINGS = GrpoSettings(dtype=torch.float32, update_weights=False)
PROMPT_TOKENS = (512, 1024, 2048)


@dataclass(kw_only=True)
class AfterLoad:
    """Observer that measures the time from the end of the load stage to the end of the last stage."""

    started_s: float = 0.0
    ended_s: float = 0.0

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        pass

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self.ended_s = time.perf_counter()
        if stage.kind == "load":
            self.started_s = self.ended_s


@dataclass(kw_only=True)
class Way:
    """One way of doing the work: ``once`` does it and returns its seconds, ``peak_bytes`` is its device peak."""

    name: str
    once: Callable[[], float]
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def read_group(policy: PolicySource, prompt_tokens: int, group_size: int) -> Group:
    """Return a group of real text; answers are repeated where more are wanted than there are."""
    tokenizer = policy.tokenizer()
    record = quickstart_group(tokenizer, prompt_tokens)
    for key in ("responses", "rewards"):
        record[key] = list(itertools.islice(itertools.cycle(record[key]), group_size))
    return parse_group(record, where="benchmark", tokenizer=tokenizer, vocab_size=policy.config.vocab_size)


def engine_way(name: str, space: GrpoSpace, budget: Budget) -> Way:
    """Return the engine's way within ``budget``."""
    planned = forecast(space.lower(space.first()), budget, load_profile("cpu"))

    def once() -> float:
        clock = AfterLoad()
        with tempfile.TemporaryDirectory(prefix="longstraw-bench-") as folder:
            outcome = execute(planned, Path(folder) / "run", observers=[clock])
        way.peak_bytes = outcome.measured_peak_bytes[str(Tier.DEVICE)]
        return clock.ended_s - clock.started_s

    way = Way(name=name, once=once)
    return way


def dense_way(hf: Any, policy: PolicySource, group: Group) -> Way:
    """Return dense autograd's way, with ``hf`` as `stages.dense.dense_model` makes it."""
    advantages = group_advantages(group, scale=SETTINGS.loss.scale_advantages)
    batch = make_batch([group], [advantages], torch.float32)
    derivatives = evaluate_loss(SETTINGS.loss, batch, torch.zeros_like(batch.advantages)).d_logprobs
    found = sequences([group])
    parts = derivatives.split([len(sequence.rows) for sequence in found])

    def once() -> float:
        for parameter in hf.parameters():
            parameter.grad = torch.zeros_like(parameter)
        started_s = time.perf_counter()
        for sequence, part in zip(found, parts, strict=True):
            logprobs, _ = scores(hf, sequence, SETTINGS.temperature)
            logprobs.backward(part)
        return time.perf_counter() - started_s

    return Way(name="dense autograd", once=once, peak_bytes=dense_peak_bytes(policy, [group], SETTINGS))


def measure(policy: PolicySource, hf: Any, prompt_tokens: int, group_size: int, rounds: int) -> list[list[str]]:
    """Return the table's rows for one prompt length."""
    group = read_group(policy, prompt_tokens, group_size)
    space = GrpoSpace(name="benchmark", policy=policy, steps=((group,),), settings=SETTINGS)
    roomy = default_budget(Path(tempfile.gettempdir()))
    plan = space.lower(space.first())
    smallest_bytes = forecast(plan, roomy, load_profile("cpu")).smallest_device_bytes
    tight = Budget(device_bytes=smallest_bytes, host_bytes=roomy.host_bytes, disk_bytes=roomy.disk_bytes)
    ways = [
        engine_way("engine, default budget", space, roomy),
        engine_way("engine, smallest budget", space, tight),
        dense_way(hf, policy, group),
    ]
    for turn, way in itertools.product(range(rounds), ways):
        way.seconds.append(way.once())
        print(f"{prompt_tokens} tokens, round {turn + 1}: {way.name} {way.seconds[-1]:.1f} s", file=sys.stderr)
    fixed_bytes = sum(plan.values[name].nbytes for name in (names.WEIGHTS, names.gradients("step0/")))
    dense_s = statistics.median(ways[-1].seconds)
    return [
        [
            str(prompt_tokens),
            way.name,
            f"{(way.peak_bytes - fixed_bytes) / MIB:.1f}",
            f"{way.peak_bytes / MIB:.1f}",
            f"{statistics.median(way.seconds):.1f}",
            f"{statistics.median(way.seconds) / dense_s:.2f}",
        ]
        for way in ways
    ]


def cpu_name() -> str:
    """Return the processor's name as Linux states it, or the platform's where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{found[0]}, {len(found)} logical cores" if found else platform.processor()


def heading(group_size: int, rounds: int) -> str:
    """Return what the figures are of: machine, versions, date, work."""
    return "\n".join(
        [
            f"- {datetime.now(UTC):%Y-%m-%d}, {cpu_name()}, {torch.get_num_threads()} threads",
            f"- LongStraw {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}",
            f"- SmolLM2-135M, float32, one group of {group_size} responses, median of {rounds} interleaved rounds",
        ]
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    header = ["prompt tokens", "way", "MiB beyond weights and gradients", "MiB in all", "s", "time / dense"]
    rule = ["---:", "---", "---:", "---:", "---:", "---:"]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="One exact GRPO step against dense autograd.")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=PROMPT_TOKENS, metavar="N")
    parser.add_argument("--group-size", type=int, default=4, metavar="G")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each way is timed")
    options = parser.parse_args(arguments)
    policy = find_policy(str(checkpoint_directory()))
    hf = dense_model(policy, SETTINGS)
    rows = []
    for prompt_tokens in options.prompt_tokens:
        rows += measure(policy, hf, prompt_tokens, options.group_size, options.rounds)
    print(f"{heading(options.group_size, options.rounds)}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
