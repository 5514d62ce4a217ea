"""What a resume decides: which attempt counts, what was asked for, and whether the plan is still the same.

Nouns: a *request* is what a run was asked to do; its journal keeps it as the *recipe*, from which a resume builds the
same plan. An *attempt* is what a journal holds from a plan record on: a run that is resumed begins again, and what came
before counts no more.

This module is pure: records in, decisions out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import engine
from engine.errors import RunDirectoryError, UsageError
from engine.journal import KeptFile, PlanRecord, Record, RunFinished, StageCommit
from engine.outputs import Outputs
from engine.plain import plain
from engine.plan import Choices, Plan
from engine.recipe import plan_keys


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a run is asked to do, besides its budget; relative paths mean what they mean in the folder ``cwd``.

    ``device`` is the name of the one that it runs on.
    """

    plan: str
    settings: tuple[str, ...]
    hardware: str
    device: str
    outputs: Outputs
    cwd: str

    @property
    def wanted(self) -> dict[str, str]:
        """The extra outputs of the plan's own, by tap."""
        return {} if self.outputs.gradients is None else {"gradients": self.outputs.gradients}

    def recipe(self) -> dict[str, object]:
        """Return the request as a journal keeps it."""
        return {
            "plan": self.plan,
            "set": list(self.settings),
            "hardware": self.hardware,
            "device": self.device,
            "wanted": self.wanted,
            "trace": self.outputs.trace,
            "report": self.outputs.report,
            "cwd": self.cwd,
        }

    @classmethod
    def of_recipe(cls, recipe: Mapping[str, object]) -> RunRequest:
        """Return the request that a journal keeps.

        Raises:
            RunDirectoryError: it keeps none, or another engine's.
        """
        match recipe:
            case {
                "plan": str(plan),
                "set": list(settings),
                "hardware": str(hardware),
                "device": str(device),
                "cwd": str(cwd),
            }:
                wanted = recipe.get("wanted")
                paths = {"trace": recipe.get("trace"), "report": recipe.get("report")}
                paths["gradients"] = wanted.get("gradients") if isinstance(wanted, dict) else None
                outputs = Outputs(**{name: path for name, path in paths.items() if isinstance(path, str)})
                words = tuple(map(str, settings))
                return cls(plan=plan, settings=words, hardware=hardware, device=device, outputs=outputs, cwd=cwd)
        raise RunDirectoryError("the run was not started by `engine execute`: its journal lacks what rebuilds the plan")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The last attempt at a run: its plan, the stages that it committed, and its results if it finished."""

    plan: PlanRecord
    commits: Sequence[StageCommit]
    results: Mapping[str, object] | None


def last_attempt(records: Sequence[Record]) -> Attempt | None:
    """Return the attempt that counts; None where not even a plan was recorded."""
    starts = [index for index, record in enumerate(records) if isinstance(record, PlanRecord)]
    if not starts:
        return None
    first, *rest = records[starts[-1] :]
    assert isinstance(first, PlanRecord)
    finished = [record.results for record in rest if isinstance(record, RunFinished)]
    commits = [record for record in rest if isinstance(record, StageCommit)]
    return Attempt(plan=first, commits=commits, results=finished[-1] if finished else None)


def unfinished(records: Sequence[Record], run: Path) -> PlanRecord:
    """Return the plan of the run that is to be resumed.

    Raises:
        RunDirectoryError: it was interrupted before its plan was recorded.
        UsageError: it is finished.
    """
    attempt = last_attempt(records)
    if attempt is None:
        raise RunDirectoryError(f"{run} was interrupted before its plan was recorded; remove it and execute again")
    if attempt.results is not None:
        raise UsageError(f"{run} is finished; engine show {run} prints its results")
    return attempt.plan


def check_same(record: PlanRecord, plan: Plan) -> Choices:
    """Return the choices that the run was started with.

    Raises:
        RunDirectoryError: its plan was another one, or the engine was.
    """
    if record.code_version != engine.CODE_VERSION:
        raise RunDirectoryError(f"the run was made by version {record.code_version}, this is {engine.CODE_VERSION}")
    choices = {name: value for name, value in record.choices.items() if name in plan.ladders and isinstance(value, int)}
    chosen = plan.lowered(choices)
    if plan_keys(chosen).fingerprint != record.fingerprint:
        now = json.loads(json.dumps(plain(chosen.settings)))  # as it is read from a journal
        either = dict.fromkeys([*record.settings, *now])
        changed = [key for key in either if record.settings.get(key) != now.get(key)]
        raise RunDirectoryError(
            f"the plan is not the one that the run was started with: {', '.join(changed) or 'its stages'} differ; "
            "bring back what was changed, or execute in a new run directory"
        )
    return choices


def kept_files(records: Iterable[Record]) -> dict[str, set[tuple[int, int]]]:
    """Return the sizes and checksums that kept files may have, by path in the results, in the order of their making."""
    kept: dict[str, set[tuple[int, int]]] = {}
    for record in records:
        if isinstance(record, KeptFile):
            kept.setdefault(record.path, set()).add((record.nbytes, record.crc32c))
    return kept
