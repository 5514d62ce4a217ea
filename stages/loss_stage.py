"""The loss stage: the one place where all scored tokens of an update meet.

It gathers the scores of every chunk into the canonical order of the step, evaluates the loss (`stages.losses`) and
hands out its derivatives, one number per token and scored quantity. Groups whose responses are sampled are put
together here from what was sampled and from their advantages.

From the second epoch of a step on, the ratios of responses that came without old log-probabilities are to the scores
of the first epoch (``first``): its works are the same chunks, so its scores are read in the same places. A sampled
response's ratio is to the recomputed log-probabilities, never to the sampler's own, which differ by rounding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from engine.context import StageContext
from engine.memory import DEVICE, LiveBytes
from stages import names
from stages.advantages import GroupAdvantages
from stages.compute import ChunkWork
from stages.groups import Group, Response, StepGroup
from stages.losses import LossConfig, LossResult, evaluate_loss, make_batch
from stages.rewards import SampledGroup
from stages.sampled import read_logprobs, read_responses

LossGroup = tuple[Group, GroupAdvantages] | SampledGroup
"""A group with its advantages, or one whose responses are sampled."""


@dataclass(frozen=True, kw_only=True)
class LossStage:
    """The loss of one update; ``works`` are its scored chunks, ``first`` those of the step's first epoch or none."""

    config: LossConfig
    groups: tuple[LossGroup, ...]
    dtype: torch.dtype
    works: tuple[ChunkWork, ...]
    first: tuple[ChunkWork, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The Values that are read: scores of this epoch and of the first, rollouts and their advantages."""
        sampled = [group for group in self.groups if isinstance(group, SampledGroup)]
        return (
            *(names.scores(work.name) for work in (*self.works, *self.first)),
            *(group.rollout_name for group in sampled),
            *(group.advantages_name for group in sampled),
        )

    @property
    def writes(self) -> tuple[str, ...]:
        """The Values that are written: derivatives."""
        return tuple(names.derivatives(work.name) for work in self.works)

    @property
    def shape(self) -> Hashable | None:
        """What decides the stage's bytes where all groups are sampled; None where given numbers decide too."""
        sampled = [group for group in self.groups if isinstance(group, SampledGroup)]
        if len(sampled) < len(self.groups):
            return None
        sizes = [(group.rollout.group_size, group.rollout.max_response_tokens) for group in sampled]
        return (tuple(sizes), tuple(work.max_rows for work in self.works), bool(self.first))

    def run(self, context: StageContext) -> None:
        """Read all scores of the step, write the derivatives by each, and report loss and metrics."""
        known = [_known(context, group) for group in self.groups]
        tensors = [
            [context.tensors(name(work.name)) for work in works]
            for name, works in (
                (names.scores, self.works),
                (names.scores, self.first),
                (names.derivatives, self.works),
            )
        ]
        result, logprobs = self._evaluate(known, *tensors)
        context.results["loss"] = result.loss
        context.results["metrics"] = {**result.metrics, **self._drift(context, logprobs)}

    def _evaluate(
        self,
        known: Sequence[tuple[Group, GroupAdvantages]],
        scores: Sequence[Any],
        first: Sequence[Any],
        derivatives: Sequence[Any],
    ) -> tuple[LossResult, torch.Tensor]:
        batch = make_batch([group for group, _ in known], [values for _, values in known], self.dtype)
        places = self._places([group for group, _ in known])
        logprobs, entropies = (_gather(places, scores, key, batch.advantages) for key in ("logprobs", "entropies"))
        if first:
            batch = replace(batch, first_logprobs=_gather(places, first, "logprobs", batch.advantages))
        result = evaluate_loss(self.config, batch, logprobs, entropies)
        for place, written in zip(places, derivatives, strict=True):
            written["logprobs"][: len(place)].copy_(result.d_logprobs[place])
            written["entropies"][: len(place)].copy_(result.d_entropies[place])
        return result, logprobs

    def _places(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """Return, per chunk, the places of its scored tokens in the canonical order of the step."""
        responses = {
            item.rollout_name: [response.token_ids for response in group.responses]
            for item, group in zip(self.groups, groups, strict=True)
            if isinstance(item, SampledGroup)
        }
        counts = [sum(response.mask) for group in groups for response in group.responses]
        first = [0, *accumulate(counts)]
        return [
            torch.tensor(
                [first[response] + rank for _, _, response, rank in work.chunk.resolve(responses).scored()],
                dtype=torch.int64,
            )
            for work in self.works
        ]

    def _drift(self, context: StageContext, logprobs: torch.Tensor) -> dict[str, float]:
        """Return how far the recomputed log-probabilities are from the sampler's, where there is one to compare."""
        if self.first or not all(isinstance(group, SampledGroup) for group in self.groups):
            return {}
        sampled = [
            value
            for group in self.groups
            if isinstance(group, SampledGroup)
            for row in read_logprobs(context, group.rollout_name)
            for value in row
        ]
        gaps = [abs(a - b) for a, b in zip(logprobs.tolist(), sampled, strict=True)]
        return {"sampling_drift_max": max(gaps), "sampling_drift_mean": sum(gaps) / len(gaps)}

    def workspace_bytes(self) -> int:
        """Return the device bytes that the stage needs, by running it once on the given log-probs (0 where none).

        Raises:
            UsageError: the loss can't be evaluated on these rollouts, such as a KL term without reference log-probs.
        """
        known = [_at_most(group) if isinstance(group, SampledGroup) else group for group in self.groups]
        batch = make_batch([group for group, _ in known], [values for _, values in known], self.dtype)
        given = [vector for vector in (batch.old_logprobs, batch.ref_logprobs) if vector is not None]
        flat = given[0] if given else torch.zeros_like(batch.advantages)
        places = self._places([group for group, _ in known])
        scores = [{key: flat[place] for key in ("logprobs", "entropies")} for place in places]
        derivatives = [{key: tensor.clone() for key, tensor in item.items()} for item in scores]
        with LiveBytes() as meter:
            self._evaluate(known, scores, scores if self.first else [], derivatives)
        return int(meter.peak[DEVICE])


def _known(context: StageContext, group: LossGroup) -> tuple[Group, GroupAdvantages]:
    """Return a group with its advantages, put together from what was sampled where need be."""
    if not isinstance(group, SampledGroup):
        return group
    return _sampled(group, read_responses(context, group.rollout_name), group.advantages(context))


def _at_most(group: SampledGroup) -> tuple[Group, GroupAdvantages]:
    """Return a sampled group as large as it can get."""
    tokens = group.rollout.max_response_tokens
    size = group.rollout.group_size
    return _sampled(group, [[0] * tokens] * size, [[0.0] * tokens] * size)


def _sampled(
    group: SampledGroup, responses: Sequence[Sequence[int]], advantages: Sequence[Sequence[float]]
) -> tuple[Group, GroupAdvantages]:
    made = Group(
        prompt_ids=group.prompt.token_ids,
        responses=tuple(Response(token_ids=tuple(ids), mask=(True,) * len(ids)) for ids in responses),
        source=group.prompt.source,
    )
    return made, GroupAdvantages(values=tuple(tuple(row) for row in advantages))


def _gather(places: Sequence[torch.Tensor], parts: Sequence[Any], key: str, like: torch.Tensor) -> torch.Tensor:
    """Return one score a token of the step, ``[tokens]``, from the scores of the chunks."""
    gathered = torch.empty_like(like)
    for place, part in zip(places, parts, strict=True):
        gathered[place] = part[key][: len(place)]
    return gathered


def loss_groups(
    groups: Sequence[StepGroup], advantages: Sequence[GroupAdvantages | None], sampled: Sequence[SampledGroup]
) -> tuple[LossGroup, ...]:
    """Return the groups of a step as the loss takes them; ``sampled`` are those without advantages, in order."""
    remaining = iter(sampled)
    return tuple(
        (group, values) if isinstance(group, Group) and values is not None else next(remaining)
        for group, values in zip(groups, advantages, strict=True)
    )
