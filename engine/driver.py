"""The one loop that feeds instructions to a machine, simulated or real.

The ledger is kept here, so that the simulator and the runtime count the same bytes by the same code: a schedule that
one of them finishes is one that the other accepts. This module is pure; machines do the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from engine.budget import Budget, Tier
from engine.ledger import Ledger
from engine.plan import Plan, Stage, Value
from engine.schedule import STAGING_ENTRY, Copy, Create, Drop, Instruction, Schedule, begin, end


class Machine(Protocol):
    """Carries out instructions."""

    def reserve(self, staging_bytes: int) -> None:
        """Hold a host buffer through which Values pass between device and disk."""

    def create(self, value: Value, tier: Tier) -> None:
        """Bring a Value to life on a tier, zero."""

    def copy(self, value: Value, source: Tier, target: Tier, *, alongside: bool) -> None:
        """Copy a Value to another tier; ``alongside`` the next stage, it is complete when that stage is."""

    def run(self, stage: Stage, slots: int = 1) -> None:
        """Run a stage whose streams have ``slots`` buffers of a piece each."""

    def drop(self, value: Value, tier: Tier) -> None:
        """Free the copy of a Value on a tier."""


class Observer(Protocol):
    """Is told around every stage, with the bytes that are planned while it runs, by tier."""

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None: ...
    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None: ...


class Recorder(Protocol):
    """Is told around every instruction, and of every byte that the ledger counts (`engine.trace.Recording`).

    An instruction begins once the ledger has counted what it adds and ends before it uncounts what it leaves behind.
    """

    def begins(self, instruction: Instruction) -> None: ...
    def ends(self, instruction: Instruction) -> None: ...
    def changed(self, tier: Tier, entry: str, nbytes: int, live_bytes: int) -> None: ...


def drive(
    plan: Plan,
    schedule: Schedule,
    budget: Budget,
    machine: Machine,
    observers: Iterable[Observer] = (),
    recorder: Recorder | None = None,
) -> Ledger:
    """Feed ``schedule`` to ``machine`` and return the ledger, with the peaks that were reached.

    Raises:
        DoesNotFitError: the schedule would exceed the budget (nothing of that instruction was done).
    """
    ledger = Ledger(budget, watch=recorder.changed if recorder is not None else None)
    observers = tuple(observers)
    stages = {stage.name: stage for stage in schedule.stages}
    if schedule.staging_bytes:
        ledger.add(Tier.HOST, STAGING_ENTRY, schedule.staging_bytes)
        machine.reserve(schedule.staging_bytes)
    for instruction in schedule.instructions:
        begin(ledger, plan, instruction)
        if recorder is not None:
            recorder.begins(instruction)
        if isinstance(instruction, Create):
            machine.create(plan.values[instruction.value], instruction.tier)
        elif isinstance(instruction, Copy):
            value, source, target = plan.values[instruction.value], instruction.source, instruction.target
            machine.copy(value, source, target, alongside=instruction.alongside)
        elif isinstance(instruction, Drop):
            machine.drop(plan.values[instruction.value], instruction.tier)
        else:
            stage, planned = stages[instruction.stage], dict(ledger.live)
            for observer in observers:
                observer.stage_begins(stage, planned)
            machine.run(stage, instruction.slots)
            for observer in observers:
                observer.stage_ends(stage, planned)
        if recorder is not None:
            recorder.ends(instruction)
        end(ledger, instruction)
    return ledger
