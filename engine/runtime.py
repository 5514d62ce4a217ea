"""Executing a plan: forecast, run directory, journal, machine, closing figures.

Life cycle of a run: the plan is chosen and scheduled before anything is written; the run directory and its journal
come next, with the plan's fingerprint; then the driver feeds the schedule to the real machine, with an intent record
before and a commit record after each stage. A stage that passes the device budget, or the bytes planned for it,
stops the run. Results are in the journal and in ``results/``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine
from engine.atomic import atomic_write_bytes, atomic_write_text, check_writable
from engine.budget import Tier
from engine.device import CpuDevice, Device
from engine.driver import Observer, drive
from engine.errors import UnsupportedModelError, UsageError
from engine.journal import (
    Journal,
    KeptFile,
    PlanRecord,
    ResultRecord,
    RunFinished,
    StageCommit,
    check_record,
    read_journal,
)
from engine.memory import DEVICE, HOST, keep_freed_memory, peak_rss_bytes
from engine.observers import Checked, FreedMemory, Journaled, scratch_of_next
from engine.output import say
from engine.own_stage import merge_reports
from engine.plain import finite, plain
from engine.plan import Plan
from engine.planner import Forecast, peak_bytes_at
from engine.recipe import plan_keys
from engine.resume import kept_files
from engine.run import METRICS_FILE, RunDirectory
from engine.schedule import Copy, Create, filled_tier
from engine.store import Store
from engine.trace import MEASURED, Recording, chrome_trace
from engine.worker import Taps, TorchMachine


@dataclass(kw_only=True)
class Outcome:
    """What a finished run reports: ``results`` of its stages and what was measured, by stage in ``commits``.

    ``actual_peak_bytes`` is the prediction at the sizes that things turned out to have; None where all were known.
    """

    results: dict[str, Any]
    measured_peak_bytes: dict[str, int]
    commits: list[StageCommit]
    wall_s: float
    stages_run: int
    rss_bytes: int
    actual_peak_bytes: dict[Tier, int] | None = None

    @property
    def stage_peak_bytes(self) -> dict[str, tuple[int, int]]:
        """Planned and measured device bytes of every stage."""
        return {
            commit.stage: (commit.planned_peak_bytes[DEVICE], commit.measured_peak_bytes[DEVICE])
            for commit in self.commits
        }

    def as_dict(self) -> dict[str, object]:
        """Return the keys that ``engine execute --json`` adds to those of ``simulate``."""
        actual = self.actual_peak_bytes
        return {
            **({} if actual is None else {"actual_peak_bytes": {str(tier): n for tier, n in actual.items()}}),
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_rss_bytes": self.rss_bytes,
            "wall_s": self.wall_s,
            "loss": self.results.get("loss"),
            "grad_norm": self.results.get("grad_norm"),
            "metrics": self.results.get("metrics", {}),
            "checkpoint": self.results.get("checkpoint"),
            "stages_run": self.stages_run,
            "stages_reused": 0,
        }


def open_taps(plan: Plan, wanted: Mapping[str, str]) -> Taps:
    """Return the taps to call per stage for extra outputs ``{tap: path}``.

    Raises:
        UsageError: the plan has no such output, or its file's folder does not exist.
    """
    taps: dict[str, list[tuple[Callable[..., None], str]]] = {}
    for name, path in wanted.items():
        if name not in plan.taps:
            raise UsageError(f"plan {plan.name!r} can't save {name}; it offers {', '.join(plan.taps) or 'nothing'}")
        check_writable(path)
        taps.setdefault(plan.taps[name].after, []).append((plan.taps[name].run, path))
    return taps


def new_recording(forecast: Forecast) -> Recording:
    """Return a recording for `execute`; its clock starts when it is first asked."""
    started: list[float] = []

    def clock() -> float:
        now = time.perf_counter()
        started[:] = started or [now]
        return now - started[0]

    return Recording(forecast.plan, forecast.budget, process=MEASURED, clock=clock)


def execute(
    forecast: Forecast,
    run_path: Path,
    *,
    plan_source: bytes | None = None,
    wanted: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
    again: bool = False,
    observers: Iterable[Observer] = (),
    recording: Recording | None = None,
    device: Device | None = None,
) -> Outcome:
    """Run a forecast plan in a new run directory and return what it reports; on the CPU unless ``device`` is given.

    With ``again`` the directory is that of an unfinished run, which begins again from its beginning.

    ``plan_source`` is kept beside the journal, ``recipe`` in it: what a resume needs to build the same plan.
    The C allocator of the process keeps freed memory from now on (`engine.memory.keep_freed_memory`), and returns it
    when the run tells it to.

    ``wanted`` are extra outputs, ``{tap: path}``. ``recording`` (`new_recording`) is for callers that want the times;
    the run directory gets them as ``trace.json`` in any case, beside the predicted ones, as far as the run came.

    Raises:
        UsageError: the run directory exists and is not empty, or an extra output can't be written.
        StageFailedError: a stage failed or used more than was planned.
        RunDirectoryError: the run directory was moved, removed or emptied meanwhile.
    """
    taps, keys = open_taps(forecast.plan, wanted or {}), plan_keys(forecast.plan)
    record = _plan_record(forecast, keys.fingerprint, recipe or {})
    if not again:
        check_record(record)  # before anything is written
    directory = RunDirectory.open(run_path) if again else RunDirectory.create(run_path)
    path = directory.journal_path
    try:
        with Journal.open(path) if again else Journal.create(path) as journal:
            if again:
                directory.clear(kept_files(read_journal(path)[0]), forecast.plan.kept_folders)
            journal.append(record, sync=True)
            if plan_source is not None:
                atomic_write_bytes(directory.plan_path, plan_source)
            return _Run(
                directory=directory,
                journal=journal,
                forecast=forecast,
                keys=keys.by_stage,
                taps=taps,
                observers=tuple(observers),
                recording=recording if recording is not None else new_recording(forecast),
                device=CpuDevice() if device is None else device,
            ).outcome()
    except UnsupportedModelError:
        if not again and not _any_commit(path):  # refused once its weights were there: nothing to resume
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One attempt at a run, from its plan record to its last one, while its journal is open."""

    directory: RunDirectory
    journal: Journal
    forecast: Forecast
    keys: Mapping[str, str]
    taps: Taps
    observers: Sequence[Observer]
    recording: Recording
    device: Device

    def outcome(self) -> Outcome:
        """Carry the plan out and leave trace, metrics and results.

        Whatever fails because the run directory went away meanwhile is told as that.
        """
        try:
            outcome = self._carried_out()
            self.journal.check_in_place()
            return outcome
        except Exception:
            self.journal.check_in_place()
            raise

    def _carried_out(self) -> Outcome:
        self.directory.results_path.mkdir(exist_ok=True)
        machine = self._machine()
        self.device.cap(self.forecast.budget.device_bytes)
        try:
            outcome = self._driven(machine)
        finally:
            self.device.cap(None)
            self.recording.close()
            self._leave_trace()
        self.journal.check_in_place()
        self._leave_metrics(outcome)
        for name, value in outcome.results.items():
            self.journal.append(ResultRecord(name=name, payload={"value": value}))
        self.journal.append(RunFinished(results=outcome.results), sync=True)
        return outcome

    def _machine(self) -> TorchMachine:
        return TorchMachine(
            self.forecast.plan,
            meter=self.device.meter(),
            device=self.device,
            store=Store.create(self.directory.store_path) if _uses_disk(self.forecast) else None,
            directory=self.directory.results_path,
            taps=self.taps,
            announce=self._announce,
        )

    def _announce(self, path: str, nbytes: int, crc32c: int) -> None:
        self.journal.append(KeptFile(path=path, nbytes=nbytes, crc32c=crc32c), sync=True)

    def _driven(self, machine: TorchMachine) -> Outcome:
        keep_freed_memory()
        plan, schedule = self.forecast.plan, self.forecast.schedule
        own = (HOST,) if self.device.kind.bounces else (DEVICE, HOST)
        freed = FreedMemory(meter=machine.meter, then_bytes=scratch_of_next(schedule), tiers=own)
        checked = Checked(machine=machine, recording=self.recording)
        journaled = Journaled(journal=self.journal, machine=machine, checked=checked, keys=self.keys)
        started = time.monotonic()
        with machine.meter:
            told: list[Observer] = [freed, checked, journaled, *self.observers]
            drive(plan, schedule, self.forecast.budget, machine, told, self.recording)
        freed.give_back()
        merge_reports(machine.results)
        actual = plan.hooks.get("actual")
        return Outcome(
            results=machine.results,
            measured_peak_bytes={**checked.overall, str(Tier.DISK): machine.disk_peak_bytes},
            commits=journaled.commits,
            wall_s=time.monotonic() - started,
            stages_run=len(schedule.stages),
            rss_bytes=peak_rss_bytes(),
            actual_peak_bytes=None if actual is None else peak_bytes_at(self.forecast, actual()),
        )

    def _leave_trace(self) -> None:
        """Write the trace; a run is not lost, and an error not hidden, because that can't be done.

        Where the run directory went away, none is made anew for it.
        """
        if not self.journal.is_in_place():
            return
        try:
            atomic_write_text(self.directory.trace_path, chrome_trace([self.forecast.recording, self.recording]))
        except OSError as error:
            say(f"note: the trace could not be written: {error}")

    def _leave_metrics(self, outcome: Outcome) -> None:
        """Write the run's numbers as one line, unless its stages have written a line for each of several updates."""
        path = self.directory.results_path / METRICS_FILE
        if not path.exists():
            numbers = {name: outcome.results[name] for name in ("loss", "grad_norm") if name in outcome.results}
            line = numbers | outcome.results.get("metrics", {})
            atomic_write_text(path, json.dumps(finite(line), allow_nan=False) + "\n")


def _plan_record(forecast: Forecast, fingerprint: str, recipe: Mapping[str, Any]) -> PlanRecord:
    return PlanRecord(
        plan=forecast.plan.name,
        fingerprint=fingerprint,
        settings=plain(forecast.plan.settings),
        choices=dict(forecast.plan.choices),
        budget_bytes=forecast.budget.as_dict(),
        code_version=engine.CODE_VERSION,
        recipe=dict(recipe),
    )


def _any_commit(journal: Path) -> bool:
    return any(isinstance(record, StageCommit) for record in read_journal(journal)[0])


def _uses_disk(forecast: Forecast) -> bool:
    """Return whether any Value but the files that stages write themselves is ever on disk."""
    values = forecast.plan.values
    return any(
        isinstance(item, Create | Copy) and filled_tier(item) is Tier.DISK and values[item.value].is_stored
        for item in forecast.schedule.instructions
    )
