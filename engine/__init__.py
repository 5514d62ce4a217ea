"""The machine: values, stages, plans, budgets, schedules, ledgers, machines, runs.

It knows bytes, stages, tiers, workers and journals, and nothing of models or reinforcement learning: it imports
neither ``stages`` nor ``models`` nor transformers. Names below load on first use, so that ``engine --help`` does not
wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.authoring import stage
    from engine.budget import Budget, Tier
    from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind

__version__ = "0.1.0"

CODE_VERSION = f"{__version__}+1"
# Goes into recipe keys and run directories; raised whenever a stage computes other bits for the same recipe.

_HOME = {
    "Budget": "engine.budget",
    "Tier": "engine.budget",
    "Plan": "engine.plan",
    "Stage": "engine.plan",
    "Stream": "engine.plan",
    "TensorSpec": "engine.plan",
    "Value": "engine.plan",
    "ValueKind": "engine.plan",
    "stage": "engine.authoring",
}

__all__ = [
    "CODE_VERSION",
    "Budget",
    "Plan",
    "Stage",
    "Stream",
    "TensorSpec",
    "Tier",
    "Value",
    "ValueKind",
    "__version__",
    "stage",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
