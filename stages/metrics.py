"""A line of metrics for every update, in ``results/metrics.jsonl`` (JSON Lines).

A line has what the update's own stages reported: the loss and its terms, the gradient's norm, the learning rate, what
was sampled for the step, and what stages of a person's own reported since the line before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from engine.context import StageContext
from engine.errors import StageFailedError
from engine.own_stage import take_reports
from engine.plain import finite
from engine.plan import Stage
from engine.run import METRICS_FILE


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """The stage that ends an update: it adds a line to the metrics file."""

    step: int
    epoch: int
    update: str
    learning_rate: float | None
    ends_step: bool

    def stage(self, after: str) -> Stage:
        """Return the stage; it reads ``after``, a Value that the update changes last, to come behind it."""
        return Stage(name=f"metrics {self.update.rstrip('/')}", kind="metrics", run=self.run, reads=(after,))

    def run(self, context: StageContext) -> None:
        """Write the line and leave its numbers as the run's metrics.

        Raises:
            StageFailedError: a stage of a person's own reported a name that the update has as well.
        """
        results = context.results
        line: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "loss": results.get("loss")}
        line["grad_norm"] = results.get("grad_norm")
        if self.learning_rate is not None:
            line["learning_rate"] = self.learning_rate
        metrics = {**results.get("metrics", {}), **results.get("rollouts", {})}
        own = take_reports(results)
        if twice := sorted(set(own) & set(metrics)):
            raise StageFailedError(f"{twice[0]!r} was reported, and the metrics have that name; report another one")
        results["metrics"] = metrics | own
        if self.ends_step:
            results.pop("rollouts", None)
        with open(context.directory / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(line | results["metrics"]), allow_nan=False) + "\n")
