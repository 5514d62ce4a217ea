"""What a step samples is on disk before it is scored, and is never made twice.

A step's rollouts file is written when everything of the step is sampled, and once more with rewards and advantages;
both have their checksums in the journal. A resumed run takes what is recorded from it: token ids and
log-probabilities instead of sampling, rewards and advantages instead of calling the plan's functions again.

The file has the format that `stages.rollouts` reads, one group a line: prompt ids, response ids (and texts), rewards,
the sampler's log-probabilities as ``old_logprobs``, and advantages where a function of the plan gave them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.context import StageContext
from engine.errors import RunDirectoryError
from engine.plan import Stage, Value, ValueKind
from engine.recipe import digest
from stages import names
from stages.files import file_value
from stages.rewards import SampledGroup, rollout_metrics
from stages.sampled import read_logprobs, read_responses
from stages.sampling import SampleWork

ROLLOUTS_FOLDER = "rollouts"

_BYTES_AN_ID = 12
_BYTES_A_NUMBER = 27
_BYTES_A_RESPONSE = 100
_BYTES_A_GROUP = 300
# What these take in a line, at most: ids below 10^10 and numbers in full precision with their separators, the keys of a
# response and its reward, the keys of a group.
_ESCAPED = 2
# JSON writes quotes, backslashes and line breaks as two characters. (Other control characters take six; a response is
# not made of those.)


def rollouts_file(step: int) -> str:
    """Return the path in the results of the file with what a step sampled."""
    return f"{ROLLOUTS_FOLDER}/step{step:05d}.jsonl"


@dataclass(kw_only=True)
class SampledSizes:
    """What sampled things came to, filled while a plan runs: tokens of responses by rollout, bytes of files."""

    lengths: dict[str, list[int]] = field(default_factory=dict)
    file_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class StepRecord:
    """A step's rollouts file: its Value, the stages that write it, and what of it was there before.

    ``sampled`` is shared by all steps of a run.
    """

    step: int
    groups: tuple[SampledGroup, ...]
    sampled: SampledSizes
    _lines: tuple[Path, list[dict[str, Any]]] | None = None

    @property
    def value(self) -> Value:
        """The file, at its largest."""
        name = f"{names.step_prefix(self.step)}rollouts"
        return file_value(name, sum(_most_bytes(group) for group in self.groups), kind=ValueKind.ORDERED)

    def rollouts_stage(self) -> Stage:
        """Return the stage that writes the file once everything is sampled."""
        return Stage(
            name=f"record-rollouts step{self.step}",
            kind="record",
            run=self.record_rollouts,
            config={"prompts": digest([list(group.prompt.token_ids) for group in self.groups])},
            reads=tuple(group.rollout_name for group in self.groups),
            writes=(self.value.name,),
            durable=True,
        )

    def rewards_stage(self) -> Stage:
        """Return the stage that writes the file again, with rewards and advantages."""
        return Stage(
            name=f"record-rewards step{self.step}",
            kind="record",
            run=self.record_rewards,
            reads=tuple(
                name
                for group in self.groups
                for name in (group.rollout_name, group.rewards_name, group.advantages_name)
            ),
            updates=(self.value.name,),
            durable=True,
        )

    # What is recorded

    def of_group(self, context: StageContext, group: int) -> dict[str, Any] | None:
        """Return what is recorded of a group; None if nothing is, yet.

        Raises:
            RunDirectoryError: the file is not what this plan samples.
        """
        path = context.directory / rollouts_file(self.step)
        if self._lines is None or self._lines[0] != path:
            if not path.is_file():
                return None
            self._lines = (path, _read(path, self.groups))
        place = [item.group for item in self.groups].index(group)
        return self._lines[1][place]

    def sample_or_recall(self, work: SampleWork, context: StageContext) -> None:
        """Fill a wave's rows of the rollout Value from the file if it has them; sample them otherwise."""
        record = self.of_group(context, work.group)
        if record is None:
            work.run(context)
            return
        tensors = context.tensors(work.rollout)
        for response in work.responses:
            ids, logprobs = _ids(record)[response], record["old_logprobs"][response]
            tensors["lengths"][response] = len(ids)
            tensors["token_ids"][response, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            tensors["logprobs"][response, : len(ids)] = torch.tensor(logprobs, dtype=tensors["logprobs"].dtype)

    def record_rollouts(self, context: StageContext) -> None:
        """Write the file without rewards, unless it is there."""
        for group in self.groups:
            lengths = [len(ids) for ids in read_responses(context, group.rollout_name)]
            self.sampled.lengths[group.rollout_name] = lengths
        if self.of_group(context, self.groups[0].group) is None:
            self._write(context, [_record(context, group) for group in self.groups])
        context.provide(self.value.name, disk_bytes=self._size(context))

    def record_rewards(self, context: StageContext) -> None:
        """Write the file with rewards and advantages, unless it has them; report what was sampled."""
        before = self._size(context)
        records = [self.of_group(context, group.group) or {} for group in self.groups]
        if any("rewards" not in record for record in records):
            pairs = zip(self.groups, records, strict=True)
            self._write(context, [record | _given(context, group) for group, record in pairs])
        context.provide(self.value.name, disk_bytes=self._size(context) - before)
        context.results["rollouts"] = rollout_metrics(context, self.groups)
        self._lines = None  # a step's prompts may be long

    def _write(self, context: StageContext, records: list[dict[str, Any]]) -> None:
        data = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
        context.keep_file(rollouts_file(self.step), data)
        self._lines = (context.directory / rollouts_file(self.step), records)

    def _size(self, context: StageContext) -> int:
        nbytes = (context.directory / rollouts_file(self.step)).stat().st_size
        self.sampled.file_bytes[self.value.name] = nbytes
        return nbytes


def _most_bytes(group: SampledGroup) -> int:
    """Return the bytes of a group's line with responses at their longest."""
    advantage = 0 if group.rollout.advantage is None else _BYTES_A_NUMBER
    token = _BYTES_AN_ID + _BYTES_A_NUMBER + advantage + _ESCAPED * group.token_text_bytes
    responses = group.rollout.group_size * _BYTES_A_RESPONSE
    return len(group.prompt.token_ids) * _BYTES_AN_ID + group.max_tokens * token + responses + _BYTES_A_GROUP


def _ids(record: dict[str, Any]) -> list[list[int]]:
    return [item["token_ids"] if isinstance(item, dict) else item for item in record["responses"]]


def _record(context: StageContext, group: SampledGroup) -> dict[str, Any]:
    """Return what was sampled, as a line of the file."""
    responses = read_responses(context, group.rollout_name)
    with_text = [{"text": group.text(ids, skip_special_tokens=False), "token_ids": ids} for ids in responses]
    return {
        "prompt": list(group.prompt.token_ids),
        "responses": responses if group.tokenizer is None else with_text,
        "old_logprobs": read_logprobs(context, group.rollout_name),
        "metadata": {"step": group.first_step + group.step, "group": group.group},
    }


def _given(context: StageContext, group: SampledGroup) -> dict[str, Any]:
    """Return what the plan's functions made of it."""
    rewards = {"rewards": group.rewards(context)}
    return rewards if group.rollout.advantage is None else rewards | {"advantages": group.advantages(context)}


def _read(path: Path, groups: Sequence[SampledGroup]) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()  # of bytes: text would also be split at other separators in it
        records: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if len(records) != len(groups):
            raise ValueError(f"it has {len(records)} groups")
        for group, record in zip(groups, records, strict=True):
            _check(record, group)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} is not what this run samples ({type(error).__name__}: {error}); remove it, and it is sampled again"
        ) from error
    return records


def _check(record: dict[str, Any], group: SampledGroup) -> None:
    """Raise ValueError, KeyError or TypeError if a line is not of this group."""
    if tuple(record["prompt"]) != group.prompt.token_ids:
        raise ValueError(f"the prompt of group {group.group} is another one")
    lengths = [len(ids) for ids in _ids(record)]
    if lengths != [len(row) for row in record["old_logprobs"]] or len(lengths) != group.rollout.group_size:
        raise ValueError(f"responses and log-probabilities of group {group.group} do not match")
    if not all(1 <= length <= group.rollout.max_response_tokens for length in lengths):
        raise ValueError(f"a response of group {group.group} has {min(lengths)} or {max(lengths)} tokens")
