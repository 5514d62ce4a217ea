"""Draws the pictures of the documentation. `make pictures` makes them all; a few minutes on two cores.

    python docs/pictures/draw.py learning OUT.svg    two runs of plans/learn_tiny.py: exact gradient and stop-prompt
    python docs/pictures/draw.py bytes OUT.svg       device bytes of a step over prompt length, beside dense autograd

Every figure is measured when the picture is made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from engine.budget import Budget, default_budget
from engine.hardware import load_profile
from engine.plan import Plan
from engine.planner import forecast
from engine.runtime import execute
from engine.units import MIB
from plans.learn_tiny import learn_tiny
from plans.tiny_dense import tiny_dense
from stages.dense import dense_peak_bytes
from stages.space import GrpoSpace

matplotlib.rcParams.update({"svg.hashsalt": "longstraw", "font.size": 11})
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

SMOOTHED_STEPS = 20
PROMPT_TOKENS = (1024, 2048, 4096, 8192, 16384)
CHUNK_TOKENS = 256
COLOURS = {"exact": "#1f6feb", "stop-prompt": "#c2410c", "dense": "#57606a"}


def run(plan: Plan, device_bytes: int | None = None) -> tuple[Path, int]:
    """Execute a plan in a temporary run directory; return its results and its measured device peak."""
    folder = Path(tempfile.mkdtemp(prefix="longstraw-pictures-"))
    room = default_budget(folder)
    budget = Budget(
        device_bytes=device_bytes or room.device_bytes, host_bytes=room.host_bytes, disk_bytes=room.disk_bytes
    )
    outcome = execute(forecast(plan, budget, load_profile("cpu")), folder / "run")
    return folder / "run" / "results", outcome.measured_peak_bytes["device"]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean over the last steps."""
    windows = (values[max(0, index + 1 - SMOOTHED_STEPS) : index + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def draw_learning(out: Path) -> None:
    """Draw the mean reward over the steps of both gradients."""
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for gradient in ("exact", "stop-prompt"):
        results, _ = run(learn_tiny(gradient=gradient))
        lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
        rewards = [line["reward_mean"] for line in lines]
        axes.plot(rewards, color=COLOURS[gradient], alpha=0.2, linewidth=0.8)
        axes.plot(smoothed(rewards), color=COLOURS[gradient], label=f'gradient="{gradient}"', linewidth=2)
        print(f"{gradient}: mean reward of the last 50 steps {sum(rewards[-50:]) / 50:.3f}")
    axes.axhline(1 / 8, color="#8c959f", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.legend(frameon=False)
    save(figure, out)


def draw_bytes(out: Path) -> None:
    """Draw the device bytes of one exact step, within one budget, and those of dense autograd."""
    ours, dense = [], []
    plans = [
        tiny_dense(prompt_tokens=tokens, group_size=4, chunk_tokens=CHUNK_TOKENS, branches_at_once=1)
        for tokens in PROMPT_TOKENS
    ]
    budget = max(forecast(plan, default_budget(Path()), load_profile("cpu")).smallest_device_bytes for plan in plans)
    for tokens, plan in zip(PROMPT_TOKENS, plans, strict=True):
        space = plan.space
        assert isinstance(space, GrpoSpace)
        ours.append(run(plan, budget)[1] / MIB)
        (groups,) = space.steps
        dense.append(dense_peak_bytes(space.policy, groups, space.settings) / MIB)  # type: ignore[arg-type]
        print(f"{tokens} prompt tokens: {ours[-1]:.2f} MiB, dense autograd {dense[-1]:.2f} MiB")
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    axes.plot(PROMPT_TOKENS, dense, "o-", color=COLOURS["dense"], label="dense autograd, layers checkpointed")
    axes.plot(PROMPT_TOKENS, ours, "o-", color=COLOURS["exact"], label="LongStraw, one budget for all", linewidth=2)
    axes.axhline(budget / MIB, color=COLOURS["exact"], linewidth=0.8, linestyle="--")
    axes.set(xlabel="prompt tokens", ylabel="device MiB, measured", ylim=(0, None))
    axes.set_xticks([0, *PROMPT_TOKENS[1:]])
    axes.legend(frameon=False)
    save(figure, out)


def save(figure: Figure, out: Path) -> None:
    """Write an SVG without a date in it, so that the same figures give the same file."""
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
    print(f"wrote {out}")


def main() -> None:
    """Draw one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = {"learning": draw_learning, "bytes": draw_bytes}
    parser.add_argument("picture", choices=pictures)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    pictures[arguments.picture](arguments.out)


if __name__ == "__main__":
    main()
