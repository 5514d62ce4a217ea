"""The loss stage: the one place where all scored tokens of a step meet.

It gathers the scores of every chunk into the canonical order of the step, evaluates the loss (`stages.losses`) and
hands out its derivatives, one number per token and scored quantity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.memory import DEVICE, LiveBytes
from engine.worker import StageContext
from stages import names
from stages.advantages import GroupAdvantages
from stages.compute import ChunkWork
from stages.groups import Group
from stages.losses import LossConfig, evaluate_loss, make_batch


@dataclass(frozen=True, kw_only=True)
class LossStage:
    """The loss stage: gathers scores in canonical order, evaluates the loss, hands out its derivatives."""

    config: LossConfig
    groups: tuple[Group, ...]
    advantages: tuple[GroupAdvantages, ...]
    dtype: torch.dtype
    works: tuple[ChunkWork, ...]

    def run(self, context: StageContext) -> None:
        """Read all scores of the step, write the derivatives by each, and report loss and metrics."""
        read = [context.tensors(names.scores(work.name)) for work in self.works]
        write = [context.tensors(names.derivatives(work.name)) for work in self.works]
        result = self._evaluate(read, write)
        context.results["loss"] = result.loss
        context.results["metrics"] = dict(result.metrics)

    def _evaluate(self, read: Sequence[Any], write: Sequence[Any]) -> Any:
        batch = make_batch(self.groups, self.advantages, self.dtype)
        places = [torch.tensor([place for _, _, place in work.scored]) for work in self.works]
        logprobs = torch.empty_like(batch.advantages)
        entropies = torch.empty_like(logprobs)
        for place, scores in zip(places, read, strict=True):
            logprobs[place] = scores["logprobs"]
            entropies[place] = scores["entropies"]
        result = evaluate_loss(self.config, batch, logprobs, entropies)
        for place, derivatives in zip(places, write, strict=True):
            derivatives["logprobs"].copy_(result.d_logprobs[place])
            derivatives["entropies"].copy_(result.d_entropies[place])
        return result

    def workspace_bytes(self) -> int:
        """Return the device bytes that the stage needs, by running it once on the given log-probs (0 where none).

        Raises:
            UsageError: the loss can't be evaluated on these rollouts, such as a KL term without reference log-probs.
        """
        batch = make_batch(self.groups, self.advantages, self.dtype)
        given = [vector for vector in (batch.old_logprobs, batch.ref_logprobs) if vector is not None]
        scores = given[0] if given else torch.zeros_like(batch.advantages)
        shapes = [
            {key: scores[[place for _, _, place in work.scored]] for key in work.score_tensors} for work in self.works
        ]
        with LiveBytes() as meter:
            self._evaluate(shapes, [{key: tensor.clone() for key, tensor in item.items()} for item in shapes])
        return int(meter.peak[DEVICE])
