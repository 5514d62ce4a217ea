"""What a run does around every stage: return freed memory, hold measured against planned bytes, write the journal.

The observers of `engine.driver.drive`, told in this order: `FreedMemory` looks at a stage's peak, which `Checked`
begins anew; `Journaled` writes what `Checked` found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from engine.budget import Tier
from engine.errors import StageFailedError, UsageError
from engine.journal import Journal, RunFinished, SpillCommit, StageCommit, StageIntent, check_record
from engine.memory import DEVICE, HOST, LiveBytes, return_freed_memory
from engine.origin import at
from engine.own_stage import merge_reports
from engine.plan import Stage
from engine.schedule import Run, Schedule
from engine.trace import Recording
from engine.units import MIB, format_bytes
from engine.worker import TorchMachine

MUCH_FREED_BYTES = 16 * MIB
# What stages have freed and the next one does not take again goes back to the operating system. Less is not worth it.

CHECKSUMS_A_RECORD = 4000
# Keeps a record well below the journal's cap; a Value has as many chunks as the model has layers.


@dataclass(kw_only=True)
class FreedMemory:
    """Observer that returns freed memory to the operating system, where the next stage does not work in it again.

    ``tiers`` are those whose memory is the process's own.

    Memory that comes back is paid for in page faults. ``then_bytes`` is the room that the stage after each takes to
    work in, ``taken_bytes`` the most that was live since memory was last returned.
    """

    meter: LiveBytes
    then_bytes: Mapping[str, int]
    tiers: tuple[str, ...] = (DEVICE, HOST)
    taken_bytes: int = 0

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        """Nothing to do: what is dropped behind a stage is seen at the end of the next."""

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        """Return what is free, if that is much."""
        peak_bytes = self.meter.peak[DEVICE] if DEVICE in self.tiers else 0
        self.taken_bytes = max(self.taken_bytes, peak_bytes + self.meter.live[HOST])
        if self.taken_bytes - self._live_bytes - self.then_bytes.get(stage.name, 0) >= MUCH_FREED_BYTES:
            self.give_back()

    def give_back(self) -> None:
        """Return all that is free."""
        return_freed_memory()
        self.taken_bytes = self._live_bytes

    @property
    def _live_bytes(self) -> int:
        return sum(self.meter.live[tier] for tier in self.tiers)


def scratch_of_next(schedule: Schedule) -> dict[str, int]:
    """Return, for every stage but the last, the bytes of workspace and buffers of the one behind it."""
    runs = [item for item in schedule.instructions if isinstance(item, Run)]
    return {run.stage: then.workspace_bytes + then.buffer_bytes for run, then in pairwise(runs)}


@dataclass(kw_only=True)
class Checked:
    """Observer that sets measured beside planned bytes of every stage and stops a run that passes them.

    ``overall`` are the peaks of the run so far, ``last_peak`` those of the last stage.
    """

    machine: TorchMachine
    recording: Recording
    overall: dict[str, int] = field(default_factory=lambda: {DEVICE: 0, HOST: 0})
    last_peak: dict[str, int] = field(default_factory=dict)

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self._note_peak()

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        meter = self.machine.meter
        self._check_results(stage)
        self.last_peak = {**meter.peak, str(Tier.DISK): self.machine.stage_disk_peak_bytes}
        self.recording.measured(self.last_peak, {**meter.live, str(Tier.DISK): self.machine.disk_bytes})
        self._note_peak()
        for tier, limit in planned_bytes.items():
            measured = self.last_peak[str(tier)]
            if measured > limit:
                raise StageFailedError(
                    f"stage {stage.name} used {format_bytes(measured)} ({measured} bytes) of the {tier}, more than the "
                    f"{format_bytes(limit)} ({limit} bytes) planned for it; the run was stopped"
                    f"{_what_to_declare(stage, measured - limit, tier)}{at(stage.origin)}"
                )

    def _check_results(self, stage: Stage) -> None:
        """Have a report that the run could not be ended with stop it where it is made."""
        results = dict(self.machine.results)
        merge_reports(results)
        try:
            check_record(RunFinished(results=results))
        except UsageError as error:
            raise StageFailedError(
                f"stage {stage.name} reports what the journal can't hold: {error}; report plain numbers and text, and "
                f"few of them{at(stage.origin)}"
            ) from error

    def _note_peak(self) -> None:
        meter = self.machine.meter
        self.overall = {tier: max(self.overall[tier], meter.peak[tier]) for tier in self.overall}
        meter.restart_peak()


def _what_to_declare(stage: Stage, over_bytes: int, tier: Tier) -> str:
    """Say what the author of a stage has to declare for it to pass; nothing for stages of ours."""
    if stage.declared_bytes is None or tier is not Tier.DEVICE:
        return ""
    return f"; declare workspace_bytes={stage.declared_bytes + over_bytes} for it, or need less"


@dataclass(kw_only=True)
class Journaled:
    """Observer that writes an intent before and a commit after each stage.

    What a durable stage put on the disk is made durable before its commit is, which says that it is there.
    """

    journal: Journal
    machine: TorchMachine
    checked: Checked
    keys: Mapping[str, str]
    commits: list[StageCommit] = field(default_factory=list)
    started: float = 0.0

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self.started = time.monotonic()
        self.journal.append(StageIntent(stage=stage.name, key=self.keys[stage.name]))

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        written = self.machine.take_written()
        for name, checksums in written.items():
            items = list(checksums.items())
            for start in range(0, len(items), CHECKSUMS_A_RECORD):
                part = dict(items[start : start + CHECKSUMS_A_RECORD])
                self.journal.append(SpillCommit(value=name, tier=str(Tier.DISK), checksums=part))
        record = StageCommit(
            stage=stage.name,
            key=self.keys[stage.name],
            planned_peak_bytes={str(tier): nbytes for tier, nbytes in planned_bytes.items()},
            measured_peak_bytes=self.checked.last_peak,
            wall_s=time.monotonic() - self.started,
        )
        if stage.durable:
            self.machine.sync(written)
        self.journal.append(record, sync=stage.durable)
        self.commits.append(record)
