"""Progress of a run: a bar on a terminal, plain lines elsewhere. Always on standard error."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

from engine.budget import Tier
from engine.output import say
from engine.plan import Stage
from engine.units import format_bytes

SECONDS_BETWEEN_LINES = 5.0
# Often enough to see that a run lives, seldom enough for a log file.


class Progress:
    """Observer that reports stages as they finish."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages, self._done = num_stages, 0
        self._last_line = 0.0
        self._bar: Any = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=num_stages, unit="stage", file=sys.stderr, leave=False, dynamic_ncols=True)

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        if self._bar is not None:
            self._bar.set_description_str(stage.name)

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES or self._done == self._num_stages:
            self._last_line = time.monotonic()
            say(
                f"[{self._done}/{self._num_stages}] {stage.name} "
                f"(device {format_bytes(planned_bytes[Tier.DEVICE])} planned)"
            )

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
