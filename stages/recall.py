"""Rollouts that an interrupted run has recorded are taken from its file and never drawn again.

A step's rollouts file is written whole once everything of the step is sampled and rewarded, before it is scored
(`stages.record`). A resumed run finds it and fills the rollout Values from it; what was not recorded yet is sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine.errors import RunDirectoryError
from engine.worker import StageContext
from stages.record import ROLLOUTS_FOLDER, rollouts_file
from stages.sampling import SampleWork


def sample_or_recall(work: SampleWork, context: StageContext) -> None:
    """Fill the wave's rows of the rollout Value from the run's file if it has them; sample them otherwise.

    Raises:
        RunDirectoryError: the file does not hold what this run samples.
    """
    path = context.directory / ROLLOUTS_FOLDER / rollouts_file(work.step)
    if not path.is_file():
        work.run(context)
        return
    record = _record(path, work)
    tensors = context.tensors(work.rollout)
    for response in work.responses:
        ids, logprobs = record["responses"][response], record["old_logprobs"][response]
        ids = ids["token_ids"] if isinstance(ids, dict) else ids
        tensors["lengths"][response] = len(ids)
        tensors["token_ids"][response, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        tensors["logprobs"][response, : len(ids)] = torch.tensor(logprobs, dtype=tensors["logprobs"].dtype)


def _record(path: Path, work: SampleWork) -> dict[str, Any]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["metadata"] == {"step": work.step, "group": work.group}:
                _check(record, work)
                return record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it, and what it held is sampled again"
        ) from error
    raise RunDirectoryError(f"{path} has no group {work.group}; remove it, and what it held is sampled again")


def _check(record: dict[str, Any], work: SampleWork) -> None:
    if record["prompt"][-1] != work.opening_id or len(record["prompt"]) != work.first_position + 1:
        raise ValueError("its prompt is another one")
    for response in work.responses:
        if not 1 <= len(record["old_logprobs"][response]) <= work.options.max_response_tokens:
            raise ValueError(f"response {response} has {len(record['old_logprobs'][response])} tokens")
