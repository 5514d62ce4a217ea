"""Stages that tests of authoring share, and plan files that are written, loaded and told by their lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import TensorSpec, stage
from engine.budget import Budget, unlimited
from engine.hardware import PROFILES
from engine.loader import find_plan
from engine.plan import Plan
from engine.planner import forecast
from engine.runtime import Outcome, execute

CPU = PROFILES["cpu"]


def matrix(rows: int, columns: int, dtype: str = "float64") -> TensorSpec:
    return TensorSpec(shape=(rows, columns), dtype=dtype)


@stage(writes=lambda rows, columns: matrix(rows, columns))
def noise(*, rows: int, columns: int, seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=numbers, dtype=torch.float64)


@stage(writes=lambda left: left, workspace_bytes=lambda left: left.nbytes)
def mix(left: torch.Tensor, right: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return left * scale + right


@stage(writes=lambda parts: matrix(parts[0].shape[0], sum(part.shape[1] for part in parts)))
def beside(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


@stage(writes=lambda whole: {"low": whole, "high": whole})
def halves(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"high": whole.clamp(min=0), "low": whole.clamp(max=0)}


@stage(writes=lambda source: source)
def square_into(source: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(source, source, out=out)


@stage(updates="total")
def add_to(total: torch.Tensor, part: torch.Tensor) -> None:
    total.add_(part)


@stage
def show(report: Callable[[str, Any], None], *, key: str, tensors: Sequence[torch.Tensor]) -> None:
    report(key, [tensor.flatten().tolist() for tensor in tensors])


def run(plan: Plan, path: Path, budget: Budget | None = None) -> Outcome:
    return execute(forecast(plan, budget or unlimited(), CPU), path)


def metrics(plan: Plan, path: Path, budget: Budget | None = None) -> Any:
    return run(plan, path, budget).results["metrics"]


HEADER = """
from engine import Plan, Stage, TensorSpec, Value, stage
from engine.plan import Cost

SPEC = TensorSpec(shape=(2, 2), dtype="float32")

@stage(writes=SPEC)
def make(seed: int = 0):
    import torch
    return torch.zeros(2, 2)

@stage(writes=SPEC)
def use(left, right):
    return left + right

@stage(updates="total")
def change(total, part):
    total.add_(part)
"""
# What every plan file below begins with; its own lines begin behind.


def write_and_load(folder: Path, body: str, top: str = "") -> Plan:
    """Write a plan file and load it; ``body`` is inside of its plan function, ``top`` stands before that."""
    lines = [
        HEADER.rstrip("\n"),
        textwrap.dedent(top).strip("\n"),
        "def build() -> Plan:",
        '    plan = Plan(name="p")',
    ]
    text = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    file = folder / "mine.py"
    file.write_text("\n".join([*lines, text, "    return plan"]).lstrip("\n") + "\n")
    return find_plan(str(file)).plan({})


def marked_line(path: Path) -> int:
    """Return the number of the line that ends in ``# here``."""
    (found,) = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# here")]
    return found
