"""Predicted against measured peaks of device, host and disk: shipped plans, and random steps under random budgets.

    python -m tests.benchmarks.predicted_bytes
    python -m tests.benchmarks.predicted_bytes --random 100 --seed 1 --no-quickstart

A random step is a tiny model of a random family and size with a random group, page, chunk, wave and way of recomputing
(some of them left to the planner), under a device budget between the smallest that the planner states and what it would
use without limit, and a host budget that may send pages to disk. Where sizes are known only when they are made
(sampled responses), the prediction is the one at the sizes that came out.

The script fails if a device peak is off by more than 1 %, if a host peak is off at all, or if a disk peak is above its
prediction or below it by more than `DISK_SLACK_BYTES`: files that a stage writes itself have headers of text, whose
length is planned at its largest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine import Tier
from engine.budget import Budget, default_budget, merge_budget, unlimited
from engine.errors import DoesNotFitError
from engine.hardware import load_profile
from engine.loader import find_plan
from engine.plan import Plan
from engine.planner import Forecast, forecast
from engine.runtime import execute
from engine.units import KIB
from stages import GrpoSettings
from tests.benchmarks.machine import heading, markdown
from tests.helpers import FAMILIES, VOCABULARY, random_group, random_ids, save_policy, step_space, tiny_config

DEVICE_TOLERANCE = 0.01
DISK_SLACK_BYTES = 8 * KIB


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Predicted and measured peaks of one plan, by tier."""

    name: str
    predicted: dict[Tier, int]
    measured: dict[Tier, int]

    def off_bytes(self, tier: Tier) -> int:
        """Return how much more was predicted than measured."""
        return self.predicted[tier] - self.measured[tier]

    @property
    def agree(self) -> bool:
        """Whether the prediction is as good as the module says."""
        device_off = abs(self.off_bytes(Tier.DEVICE)) / self.measured[Tier.DEVICE]
        disk_off_bytes = self.off_bytes(Tier.DISK)
        return (
            device_off <= DEVICE_TOLERANCE
            and self.off_bytes(Tier.HOST) == 0
            and 0 <= disk_off_bytes <= DISK_SLACK_BYTES
        )


def run(name: str, planned: Forecast, folder: Path) -> Peaks:
    """Execute a forecast plan in a new directory of ``folder``."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        outcome = execute(planned, Path(place) / "run")
    return Peaks(
        name=name,
        predicted=outcome.actual_peak_bytes or planned.peak_bytes,
        measured={tier: outcome.measured_peak_bytes[str(tier)] for tier in Tier},
    )


def shipped(folder: Path, *, quickstart: bool) -> Iterator[Peaks]:
    """Yield the peaks of the shipped plans, with their own budgets; ``learn_tiny`` takes three steps."""
    small = {"prompt_tokens": "512", "compare_dense": "False"}
    cases: list[tuple[str, dict[str, str]]] = [
        ("tiny_dense", {}),
        ("tiny_hybrid", {}),
        ("custom_stage", {}),
        ("learn_tiny", {"steps": "3"}),
        ("from_rollouts", rollouts_settings(folder)),
    ]
    if quickstart:
        cases += [("quickstart", small), ("quickstart", {"compare_dense": "False"})]
    for name, settings in cases:
        plan = find_plan(name).plan(settings)
        budget = merge_budget(plan.budget, default_budget(folder))
        words = [f"{key}={value}" for key, value in settings.items() if key in ("prompt_tokens", "steps")]
        yield run(" ".join([name, *words]), forecast(plan, budget, load_profile("cpu")), folder)


def rollouts_settings(folder: Path) -> dict[str, str]:
    """Return settings of ``from_rollouts``: a tiny policy and a file of two groups, two steps."""
    policy, file = folder / "policy", folder / "rollouts.jsonl"
    save_policy(policy, tiny_config("qwen3"))
    numbers = random.Random(0)
    with file.open("w") as lines:
        for prompt_tokens in (300, 120):
            record = {
                "prompt": random_ids(numbers, prompt_tokens),
                "responses": [random_ids(numbers, count) for count in (20, 7, 30)],
                "rewards": [1.0, 0.0, 0.5],
            }
            lines.write(json.dumps(record) + "\n")
    return {"policy": str(policy), "rollouts": str(file), "steps": "2", "page_tokens": "32"}


def random_step(numbers: random.Random) -> tuple[str, Plan]:
    """Return a random step and what it is, in words."""
    family, tied = numbers.choice(FAMILIES), numbers.random() < 0.5
    layers, hidden = numbers.randint(1, 4), numbers.choice((32, 64))
    config = tiny_config(family, num_hidden_layers=layers, hidden_size=hidden, tie_word_embeddings=tied)
    responses = [numbers.randint(1, 40) for _ in range(numbers.randint(1, 5))]
    prompt_tokens = numbers.randint(2, 600)
    choices = {
        "chunk_tokens": numbers.choice((None, 16, 50, 128, 512)),
        "branches_at_once": numbers.choice((None, 1, 2)),
        "head_rows": numbers.choice((None, 8, 64)),
        "stored_inputs": numbers.choice((None, 0, 1)),
    }
    fixed = {name: value for name, value in choices.items() if value is not None}
    settings = GrpoSettings(
        dtype=numbers.choice((torch.float32, torch.float64, torch.bfloat16)),
        page_tokens=numbers.choice((16, 64)),
        fixed={name: value for name, value in fixed.items() if name in known_choices()},
        update_weights=numbers.random() < 0.5,
    )
    group = random_group(numbers.randrange(1000), prompt_tokens, responses, VOCABULARY)
    space = step_space(config, [group], settings)
    words = f"{family}, {layers} x {hidden}, P={prompt_tokens}, G={len(responses)}, {settings.dtype}, {settings.fixed}"
    return words.replace("torch.", ""), space.lower(space.first())


def known_choices() -> set[str]:
    """Return the names of the choices that there are."""
    group = random_group(0, 8, [2], VOCABULARY)
    return set(step_space(tiny_config(), [group], GrpoSettings()).ladders)


def random_budget(numbers: random.Random, plan: Plan) -> Budget:
    """Return a budget that fits, and may be tight on the device and on the host."""
    roomy = forecast(plan, unlimited(), load_profile("cpu"))
    smallest_bytes = roomy.smallest_device_bytes
    spare_bytes = max(0, roomy.peak_bytes[Tier.DEVICE] - smallest_bytes)
    budget = replace(unlimited(), device_bytes=smallest_bytes + int(numbers.random() * spare_bytes))
    tight = forecast(plan, budget, load_profile("cpu"))
    host_bytes = int(tight.peak_bytes[Tier.HOST] * numbers.choice((0.3, 0.6, 1)))
    while host_bytes:
        try:
            forecast(plan, replace(budget, host_bytes=host_bytes), load_profile("cpu"))
        except DoesNotFitError:
            host_bytes = int(host_bytes * 1.2) + 1
        else:
            return replace(budget, host_bytes=host_bytes)
    return budget


def random_steps(folder: Path, count: int, seed: int) -> Iterator[Peaks]:
    """Yield the peaks of random steps under random budgets."""
    for index in range(count):
        numbers = random.Random(f"{seed}/{index}")
        name, plan = random_step(numbers)
        yield run(name, forecast(plan, random_budget(numbers, plan), load_profile("cpu")), folder)


def table(found: Sequence[Peaks]) -> str:
    """Return the peaks, and how far they are apart."""
    header = ["plan", *(f"{tier} {what}" for tier in Tier for what in ("predicted", "measured")), "device off", "agree"]
    rows = [
        [
            item.name,
            *(f"{numbers[tier]:,}" for tier in Tier for numbers in (item.predicted, item.measured)),
            f"{item.off_bytes(Tier.DEVICE) / item.measured[Tier.DEVICE]:.3%}",
            "yes" if item.agree else "NO",
        ]
        for item in found
    ]
    return markdown(header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a prediction was off."""
    parser = argparse.ArgumentParser(description="Predicted against measured peaks.")
    parser.add_argument("--random", type=int, default=30, metavar="N", help="number of random steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-quickstart", action="store_true", help="leave out the plan that needs SmolLM2-135M")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longstraw-bench-") as place:
        folder = Path(place)
        found = list(shipped(folder, quickstart=not options.no_quickstart))
        found += random_steps(folder, options.random, options.seed)
    print(f"{heading('peaks in bytes')}\n\n{table(found)}\n")
    wrong = [item.name for item in found if not item.agree]
    print(f"{len(found) - len(wrong)} of {len(found)} predictions agree.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
