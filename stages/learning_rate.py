"""The learning rate of every update, known when a run is planned: linear warm-up, then constant, linear or cosine.

Updates are counted from 0. The decays are those of transformers' ``get_scheduler``, update for update. The warm-up is
one ahead of it: update ``u`` has ``peak * (u + 1) / warmup``, so that the first update is not lost at a rate of 0
(where transformers has ``u / warmup``) and the last one of the warm-up has the peak.

This module is pure: no torch.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from engine.errors import UsageError

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    update: int,
    *,
    total: int,
    peak: float,
    warmup: int = 0,
    schedule: str = "constant",
    final_ratio: float = 0.0,
) -> float:
    """Return the learning rate of an update (counted from 0) of ``total``.

    A warm-up may be longer than the run, which then ends in it. A decay ends at ``final_ratio`` times the peak, which
    it would reach at update ``total``, one after the last.

    Raises:
        UsageError: a value out of its range, or an update after the last.
    """
    _check(update, total=total, peak=peak, warmup=warmup, schedule=schedule, final_ratio=final_ratio)
    if update < warmup:
        return peak * ((update + 1) / warmup)
    done = (update - warmup) / max(1, total - warmup)
    match schedule:
        case "linear":
            left = 1.0 - done
        case "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * done))
        case _:
            left = 1.0
    return peak * (final_ratio + (1.0 - final_ratio) * left)


def _check(update: int, *, total: int, peak: float, warmup: int, schedule: str, final_ratio: float) -> None:
    if schedule not in get_args(Schedule):
        raise UsageError(f"schedule={schedule!r} is not known; choose one of {', '.join(get_args(Schedule))}")
    if not (math.isfinite(peak) and peak >= 0):
        raise UsageError(f"learning_rate={peak!r} must be a number of at least 0")
    if total < 1:
        raise UsageError(f"total={total!r} updates: must be a whole number of at least 1")
    if warmup < 0:
        raise UsageError(f"warmup_updates={warmup!r} must be a whole number of at least 0")
    if not 0 <= final_ratio <= 1:
        raise UsageError(f"final_ratio={final_ratio!r} must be a number from 0 to 1")
    if final_ratio and schedule == "constant":
        raise UsageError(f"final_ratio={final_ratio!r} has no meaning for a constant learning rate; leave it out")
    if not 0 <= update < total:
        raise UsageError(
            f"update {update} is not one of the {total} that the learning rate is planned for, counted from 0; "
            "plan it for more"
        )
