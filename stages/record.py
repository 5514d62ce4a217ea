"""What a run writes as it goes: sampled rollouts, one file a step, and metrics, one line an update.

Rollouts are written before they are scored, in the format that `stages.rollouts` reads: prompt ids, response ids and
texts, rewards, and the sampler's log-probabilities as ``old_logprobs``. Metrics are JSON Lines in
``results/metrics.jsonl``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.budget import Tier
from engine.plan import Stage, TensorSpec, Value
from engine.run import atomic_write_text
from engine.runtime import METRICS_FILE, finite
from engine.worker import StageContext
from stages import names
from stages.groups import Group, Response, group_record
from stages.rewards import Sample, SampledGroup
from stages.sampled import read_logprobs

ROLLOUTS_FOLDER = "rollouts"

_BYTES_A_TOKEN = 64
_BYTES_A_PROMPT_TOKEN = 12
_BYTES_A_GROUP = 1000
# What a token takes in the file: its id and log-probability in full precision, its text; and what a line has besides.


def rollouts_file(step: int) -> str:
    """Return the name of the file with what a step sampled."""
    return f"step{step:05d}.jsonl"


@dataclass(kw_only=True)
class SampledSizes:
    """What sampled things came to, filled while a plan runs: tokens of responses by rollout, bytes of files."""

    lengths: dict[str, list[int]] = field(default_factory=dict)
    file_bytes: dict[str, int] = field(default_factory=dict)


def file_value(name: str, nbytes: int) -> Value:
    """Return the Value of a rollouts file."""
    file = TensorSpec(shape=(nbytes,), dtype="uint8")
    return Value(name=name, tensors={"file": file}, tiers=(Tier.DISK,), provided=True, keep=True)


@dataclass(frozen=True, kw_only=True)
class RolloutsFile:
    """The stage that writes what a step sampled, and its Value: the file."""

    step: int
    groups: tuple[SampledGroup, ...]
    sampled: SampledSizes

    @property
    def value(self) -> Value:
        nbytes = sum(
            len(group.prompt.token_ids) * _BYTES_A_PROMPT_TOKEN + group.max_tokens * _BYTES_A_TOKEN + _BYTES_A_GROUP
            for group in self.groups
        )
        return file_value(f"{names.step_prefix(self.step)}rollouts", nbytes)

    def stage(self) -> Stage:
        return Stage(
            name=f"rollouts step{self.step}",
            kind="rollouts",
            run=self.run,
            config={"prompts": [list(group.prompt.token_ids[-4:]) for group in self.groups]},
            reads=tuple(
                name(group.step, group.group)
                for group in self.groups
                for name in (names.rollout, names.rewards, names.advantages)
            ),
            writes=(self.value.name,),
        )

    def run(self, context: StageContext) -> None:
        """Write the file and report what was sampled."""
        path = context.directory / ROLLOUTS_FOLDER / rollouts_file(self.step)
        lines, sampled, rewards = [], [], []
        for group in self.groups:
            samples = group.samples(context)
            found = group.rewards(context)
            lines.append(json.dumps(_record(context, group, samples, found)))
            sampled += samples
            rewards.append(found)
        text = "".join(f"{line}\n" for line in lines)
        atomic_write_text(path, text)
        self.sampled.file_bytes[self.value.name] = len(text.encode())
        context.provide(self.value.name, disk_bytes=len(text.encode()))
        context.results["rollouts"] = rollout_metrics(sampled, rewards)
        for group in self.groups:
            name = names.rollout(group.step, group.group)
            self.sampled.lengths[name] = [len(item.token_ids) for item in sampled if item.group == group.group]


def _record(
    context: StageContext, group: SampledGroup, samples: Sequence[Sample], rewards: Sequence[float]
) -> dict[str, Any]:
    logprobs = read_logprobs(context, names.rollout(group.step, group.group))
    advantages = None if group.rollout.advantage is None else group.advantages(context)
    made = Group(
        prompt_ids=group.prompt.token_ids,
        responses=tuple(
            Response(
                token_ids=sample.token_ids,
                mask=(True,) * len(sample.token_ids),
                reward=reward,
                advantage=None if advantages is None else tuple(advantages[sample.response]),
                old_logprobs=tuple(logprobs[sample.response]),
            )
            for sample, reward in zip(samples, rewards, strict=True)
        ),
        source=group.prompt.source,
    )
    record = group_record(made)
    del record["response_masks"]
    if group.tokenizer is not None:
        record["responses"] = [
            {"text": group.text(sample.token_ids, skip_special_tokens=False), "token_ids": list(sample.token_ids)}
            for sample in samples
        ]
    return record | {"metadata": {"step": group.step, "group": group.group}}


def rollout_metrics(samples: Sequence[Sample], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what metrics say of a step's sampled responses; ``rewards`` are by group."""
    flat = [reward for group in rewards for reward in group]
    mean = math.fsum(flat) / len(flat)
    lengths = [len(sample.token_ids) for sample in samples]
    return {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in flat) / len(flat)),
        "reward_min": min(flat),
        "reward_max": max(flat),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": float(max(lengths)),
        "finished_fraction": sum(sample.finished for sample in samples) / len(samples),
        "groups_without_signal": float(sum(len(set(group)) == 1 for group in rewards)),
    }


@dataclass(frozen=True, kw_only=True)
class MetricsLine:
    """The stage that ends an update: it adds a line to the metrics file."""

    step: int
    epoch: int
    update: str
    learning_rate: float | None

    def stage(self, after: str) -> Stage:
        """Return the stage; it reads ``after``, a Value that the update changes last, to come behind it."""
        return Stage(name=f"metrics {self.update.rstrip('/')}", kind="metrics", run=self.run, config={}, reads=(after,))

    def run(self, context: StageContext) -> None:
        """Write the line and leave its numbers as the run's metrics."""
        results = context.results
        line: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "loss": results.get("loss")}
        line["grad_norm"] = results.get("grad_norm")
        if self.learning_rate is not None:
            line["learning_rate"] = self.learning_rate
        metrics = {**results.get("metrics", {}), **results.get("rollouts", {})}
        results["metrics"] = metrics
        with open(context.directory / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(line | metrics), allow_nan=False) + "\n")
