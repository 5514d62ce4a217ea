"""All that decides the result of a GRPO step besides policy and rollouts, and how plans spell it.

Every plan that makes a GRPO step uses the same flat names, which ``--set`` overrides; `step_settings` turns them into
a `GrpoSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from engine.errors import UsageError
from engine.plan import Choices
from stages.advantages import Baseline
from stages.losses import LossConfig
from stages.update import AdamWOptions

Gradient = Literal["exact", "stop-prompt"]

DEFAULT_PAGE_TOKENS = 512

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """All that decides the result of a step, besides policy and rollouts."""

    gradient: str = "exact"
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: AdamWOptions = field(default_factory=AdamWOptions)
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    seed: int = 0
    baseline: Baseline = "mean"
    page_tokens: int = DEFAULT_PAGE_TOKENS
    fixed: Choices = field(default_factory=dict)
    update_weights: bool = True

    def __post_init__(self) -> None:
        if self.gradient not in ("exact", "stop-prompt"):
            raise UsageError(f"gradient={self.gradient!r} is not known; choose exact or stop-prompt")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature!r} must be a positive number")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed={self.seed!r} must be a whole number of at least 0 that fits 63 bits")
        for name, value in {**self.fixed, "page_tokens": self.page_tokens}.items():
            if not 1 <= value < 2**31:
                raise UsageError(f"{name}={value!r} must be a whole number of at least 1 that fits 31 bits")


def parse_dtype(name: str | None, default: torch.dtype = torch.float32) -> torch.dtype:
    """Return the compute dtype of that name. Raises UsageError for a name that is not one of the three."""
    if name is None:
        return default if default in _DTYPES.values() else torch.float32
    if name not in _DTYPES:
        raise UsageError(f"dtype={name!r} is not known; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


_LOSS_NAMES = (
    "loss", "aggregation", "epsilon", "epsilon_high", "delta", "kl", "beta", "entropy_bonus", "max_response_tokens",
)  # fmt: skip
_OPTIMIZER_NAMES = ("learning_rate", "weight_decay", "max_grad_norm")
_CHOICE_NAMES = ("chunk_tokens", "branches_at_once", "head_rows")
_OWN_NAMES = ("gradient", "temperature", "seed", "baseline", "page_tokens")


def step_settings(*, dtype: torch.dtype, **flat: Any) -> GrpoSettings:
    """Return the settings that plans spell as flat keyword arguments; a choice of None is left to the planner.

    Known names: those of `stages.losses.LossConfig`, learning_rate, weight_decay, max_grad_norm, gradient,
    temperature, seed, baseline, page_tokens, chunk_tokens, branches_at_once and head_rows.

    Raises:
        UsageError: an unknown name, or a value out of its range.
    """
    known = (*_LOSS_NAMES, *_OPTIMIZER_NAMES, *_CHOICE_NAMES, *_OWN_NAMES)
    unknown = [name for name in flat if name not in known]
    if unknown:
        raise UsageError(f"no setting {unknown[0]!r}; known are {', '.join(known)}")

    def given(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: flat[name] for name in names if name in flat}

    return GrpoSettings(
        loss=LossConfig(**given(_LOSS_NAMES)),
        optimizer=AdamWOptions(**given(_OPTIMIZER_NAMES)),
        fixed={name: value for name, value in given(_CHOICE_NAMES).items() if value is not None},
        dtype=dtype,
        **given(_OWN_NAMES),
    )
