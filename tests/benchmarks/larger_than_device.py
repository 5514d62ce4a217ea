"""One step of a model whose weights do not fit the device, against the same step with room for everything.

    python -m tests.benchmarks.larger_than_device [--prompt-tokens 512] [--share 0.9]

The model is SmolLM2-135M in float32 and runs a step on real text: four responses of 32 tokens, forward, backward,
AdamW, checkpoint. The device budget of the one run is a share of the bytes of the weights alone, so the planner brings
the model to the device layer by layer; the other has no bounds. Both have the choices of the tight one that change
rounding, so their gradients must be the same bits: otherwise, or where more was measured than planned, the exit code
is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.budget import UNLIMITED_BYTES, Budget, Tier
from engine.hardware import load_profile
from engine.plan import Plan
from engine.planner import Forecast, forecast
from engine.runtime import Outcome, execute
from plans.quickstart_data import documentation_prompt
from stages import GrpoSettings, grpo_step, names, parse_group
from tests.benchmarks.machine import heading, markdown, mib
from tests.benchmarks.step_against_alternatives import benchmark_policy
from tests.helpers import same_bits

GROUP_SIZE, RESPONSE_TOKENS = 4, 32
ROUNDING_CHOICES = ("chunk_tokens", "branches_at_once", "head_rows")


def step(prompt_tokens: int, fixed: Mapping[str, int]) -> Plan:
    """Return a step on the documentation's text; the responses are what follows the prompt in it."""
    policy, count = benchmark_policy(), GROUP_SIZE * RESPONSE_TOKENS
    tokenizer = policy.tokenizer()
    text = documentation_prompt(tokenizer, prompt_tokens + count)
    cuts = range(prompt_tokens, prompt_tokens + count, RESPONSE_TOKENS)
    record: dict[str, Any] = {
        "prompt": text[:prompt_tokens],
        "responses": [text[first : first + RESPONSE_TOKENS] for first in cuts],
        "rewards": [float(index) for index in range(GROUP_SIZE)],
    }
    group = parse_group(record, where="benchmark", tokenizer=tokenizer, vocab_size=policy.config.vocab_size)
    return grpo_step(name="larger_than_device", policy=policy, groups=[group], settings=GrpoSettings(fixed=fixed))


def weights_bytes(plan: Plan) -> int:
    """Return the bytes of the model's parameters, in one Value or many."""
    prefix = f"{names.WEIGHTS}/"
    shards = [value.nbytes for name, value in plan.values.items() if name.startswith(prefix)]
    return sum(shards) or plan.values[names.WEIGHTS].nbytes


def done(planned: Forecast, folder: Path) -> tuple[Outcome, dict[str, torch.Tensor], float]:
    """Execute a plan in a new folder; return what it reports, its gradients, and its seconds."""
    gradients, began = f"{folder}.safetensors", time.monotonic()
    outcome = execute(planned, folder, wanted={"gradients": gradients})
    return outcome, load_file(gradients), time.monotonic() - began


def row(name: str, planned: Forecast, outcome: Outcome, seconds: float) -> list[str]:
    limit = planned.budget.device_bytes
    return [
        name,
        "none" if limit == UNLIMITED_BYTES else mib(limit),
        mib(planned.peak_bytes[Tier.DEVICE]),
        mib(outcome.measured_peak_bytes["device"]),
        mib(outcome.measured_peak_bytes["host"]),
        f"{planned.makespan_s:.1f}",
        f"{seconds:.1f}",
        ", ".join(f"{key} {value}" for key, value in planned.plan.choices.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.9, help="device budget, in bytes of the weights")
    parser.add_argument("--hardware", default="cpu")
    arguments = parser.parse_args()
    profile, plan = load_profile(arguments.hardware), step(arguments.prompt_tokens, {})
    weights = weights_bytes(plan)
    tight = Budget(device_bytes=int(arguments.share * weights), host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    small = forecast(plan, tight, profile)
    same = {name: small.plan.choices[name] for name in ROUNDING_CHOICES}
    roomy = Budget(device_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    large = forecast(step(arguments.prompt_tokens, same), roomy, profile)
    with tempfile.TemporaryDirectory() as folder:
        found = [done(planned, Path(folder) / name) for name, planned in (("tight", small), ("roomy", large))]
    (small_outcome, small_gradients, small_s), (large_outcome, large_gradients, large_s) = found
    print(heading(f"weights {mib(weights)} MiB; {arguments.prompt_tokens} prompt tokens; MiB and seconds"))
    columns = ["run", "device budget", "planned", "measured", "host", "simulated s", "measured s", "choices"]
    rows = [row("tight", small, small_outcome, small_s), row("roomy", large, large_outcome, large_s)]
    print(markdown(columns, rows))
    equal = same_bits(small_gradients, large_gradients)
    kept = small_outcome.measured_peak_bytes["device"] <= small.peak_bytes[Tier.DEVICE] <= tight.device_bytes < weights
    print(f"\ngradients are {'the same bits' if equal else 'NOT the same bits'}; "
          f"the budget was {'kept' if kept else 'NOT kept'}")  # fmt: skip
    return 0 if equal and kept else 1


if __name__ == "__main__":
    sys.exit(main())
