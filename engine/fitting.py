"""Prices of work from stages that were run: the least-squares fit behind ``engine calibrate``.

A profile's time is linear in its prices (`engine.hardware`), so stages whose cost and time are known are linear
equations for them. Each counts with the square of its relative error, times the square root of its time. Relative
errors alone would make sums too small, so a plan as a whole is an equation like a stage. A machine's plans can't tell
every kind from every other (in one model the softmax's scores and the FLOPs around them always come together), so the
prices of a known profile are equations, too, of little weight: they decide where the stages don't.

Invariant: prices stay positive, so that more work never takes less time. This module is pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.errors import UsageError
from engine.hardware import HardwareProfile
from engine.plan import Cost

Numbers = npt.NDArray[np.float64]

FITTED = (
    "flops",
    "attention_flops",
    "attention_backward_flops",
    "attention_scores",
    "moved_bytes",
    "weight_bytes",
    "written_bytes",
    "num_kernels",
)
# Kinds whose prices stages tell; what transfers take is measured by itself.
_STAGE = len(FITTED)
# The column of the price of a stage.
_KNOWN_WEIGHT = 0.01
# Of a known price against all stages together: enough to decide what they leave open, too little to pull a price that
# they agree on by more than a few percent.
_LEAST_PART = 0.1
# No price falls below this part of the known one, however well it would fit: a price of nothing is no price.


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A stage that was run, or ``num_stages`` of them together: what it costs, and the seconds it took."""

    name: str
    cost: Cost
    seconds: float
    num_stages: int = 1


def together(name: str, observations: Sequence[Observation]) -> Observation:
    """Return what was observed of several stages as one."""
    return Observation(
        name=name,
        cost=sum((item.cost for item in observations), Cost()),
        seconds=sum(item.seconds for item in observations),
        num_stages=sum(item.num_stages for item in observations),
    )


def fit_profile(name: str, observations: Sequence[Observation], known: HardwareProfile) -> HardwareProfile:
    """Return ``known`` under another name, with the prices of `FITTED` kinds and of a stage as they were observed.

    Raises:
        UsageError: there are no observations.
    """
    if not observations:
        raise UsageError("a profile can't be fitted to no stages at all; run some first")
    prices = _fit(observations, known)
    rates = {f"{_FIELDS[kind]}": 1.0 / price for kind, price in zip(FITTED, prices[:_STAGE], strict=True)}
    kernel_s = 1.0 / rates.pop("kernel_s")
    return replace(known, name=name, kernel_s=kernel_s, stage_s=float(prices[_STAGE]), **rates)


_FIELDS = {
    "flops": "flops_per_s",
    "attention_flops": "attention_flops_per_s",
    "attention_backward_flops": "attention_backward_flops_per_s",
    "attention_scores": "attention_scores_per_s",
    "moved_bytes": "memory_bytes_per_s",
    "weight_bytes": "weight_bytes_per_s",
    "written_bytes": "saved_bytes_per_s",
    "num_kernels": "kernel_s",
}


def _fit(observations: Sequence[Observation], known: HardwareProfile) -> Numbers:
    """Return the prices of `FITTED` kinds, then of a stage; all of at least `_LEAST_PART` of the known ones."""
    listed = known.prices()
    scale = np.array([*(listed[kind] for kind in FITTED), known.stage_s])
    seconds = np.array([item.seconds for item in observations])
    work = np.array([[*(item.cost.by_kind()[kind] for kind in FITTED), item.num_stages] for item in observations])
    weight = seconds**-0.75 / np.sum(seconds**0.5) ** 0.5
    rows = np.vstack([weight[:, None] * work * scale, _KNOWN_WEIGHT * np.eye(len(scale))])
    wanted = np.concatenate([weight * seconds, np.full(len(scale), _KNOWN_WEIGHT)])
    parts = np.full(len(scale), _LEAST_PART)
    free = np.ones(len(scale), dtype=bool)
    while free.any():
        rest = wanted - rows[:, ~free] @ parts[~free]
        parts[free] = np.linalg.lstsq(rows[:, free], rest, rcond=None)[0]
        low = free & (parts < _LEAST_PART)
        if not low.any():
            break
        parts[low], free = _LEAST_PART, free & ~low
    prices: Numbers = parts * scale
    return prices
