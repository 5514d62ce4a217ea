"""From a plan and a budget to choices and a schedule.

The planner starts from the fastest choices and, while the binding stage needs more device bytes than the budget has,
lets the plan's `ChoiceSpace` pull its next lever for that stage. ``smallest_device_bytes`` is the lowest floor of any
declared choice: no schedule of any of them needs less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.budget import Budget, Tier
from engine.driver import drive
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile, load_profile
from engine.origin import at
from engine.plan import ActualSizes, Choices, Plan, Stage
from engine.schedule import Run, Schedule, device_floor, make_schedule
from engine.simulated import SimulatedMachine
from engine.trace import PREDICTED, Recording
from engine.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan under chosen choices, its schedule, and what the simulator says of it; ``recording`` has the times."""

    plan: Plan
    budget: Budget
    schedule: Schedule
    peak_bytes: dict[Tier, int]
    makespan_s: float
    stage_s: dict[str, float]
    moved_bytes: dict[str, int]
    transfer_s: float
    smallest_device_bytes: int
    recording: Recording

    def as_dict(self) -> dict[str, object]:
        """Return the keys of ``engine simulate --json``."""
        peak = {str(tier): nbytes for tier, nbytes in self.peak_bytes.items()}
        return {
            "feasible": True,
            "budget_bytes": self.budget.as_dict(),
            "peak_bytes": peak,
            "workers": [{"peak_bytes": peak, "busy_s": sum(self.stage_s.values()), "span": None}],
            "binding_stage": self.schedule.binding_stage,
            "smallest_device_bytes": self.smallest_device_bytes,
            "makespan_s": self.makespan_s,
            "moved_bytes": self.moved_bytes,
            "num_stages": len(self.schedule.stages),
            "choices": dict(self.plan.choices),
            "notes": list(self.plan.notes),
        }


def forecast(plan: Plan, budget: Budget, profile: HardwareProfile) -> Forecast:
    """Choose, schedule and simulate.

    Raises:
        DoesNotFitError: no declared choice fits; names the binding stage and the bytes it needs.
        PlanError: the plan is not well formed.
    """
    smallest = _leanest(plan)
    smallest_bytes, smallest_stage = device_floor(smallest)
    if smallest_bytes > budget.device_bytes:
        raise DoesNotFitError(
            _refusal(smallest_stage, smallest_bytes, budget, has_choices=plan.space is not None),
            report=_report(_whole(plan, smallest), smallest_stage.name, smallest_bytes, budget),
        )
    chosen = _choose(plan, budget, smallest)
    try:
        schedule = make_schedule(chosen, budget, profile)
    except DoesNotFitError as error:
        error.report = _report(chosen, str(error.report.get("binding_stage")), smallest_bytes, budget)
        raise
    machine = SimulatedMachine(chosen, profile)
    recording = Recording(chosen, budget, process=PREDICTED, clock=lambda: machine.clock_s)
    ledger = drive(chosen, schedule, budget, machine, recorder=recording)
    recording.close()
    return Forecast(
        plan=chosen,
        budget=budget,
        schedule=schedule,
        peak_bytes=dict(ledger.peak),
        makespan_s=machine.clock_s,
        stage_s=machine.stage_s,
        moved_bytes=machine.moved_bytes,
        transfer_s=machine.transfer_s,
        smallest_device_bytes=smallest_bytes,
        recording=recording,
    )


def peak_bytes_at(forecast: Forecast, actual: ActualSizes) -> dict[Tier, int]:
    """Return the peaks of a schedule at the sizes that things turned out to have."""
    plan = replace(forecast.plan, values=forecast.plan.values | dict(actual.values))
    instructions = tuple(
        replace(item, workspace_bytes=actual.workspace_bytes[item.stage])
        if isinstance(item, Run) and item.stage in actual.workspace_bytes
        else item
        for item in forecast.schedule.instructions
    )
    machine = SimulatedMachine(plan, load_profile("cpu"))
    ledger = drive(plan, replace(forecast.schedule, instructions=instructions), forecast.budget, machine)
    return dict(ledger.peak)


def _leanest(plan: Plan) -> Plan:
    """Return a sketch of the plan with the lowest device floor among those that the space names as leanest."""
    if plan.space is None:
        return plan
    return min((plan.sketched(choices) for choices in plan.space.leanest()), key=lambda item: device_floor(item)[0])


def _choose(plan: Plan, budget: Budget, smallest: Plan) -> Plan:
    """Return the plan under the first choices, from the fastest down, whose floor is within the budget.

    Where the levers run out before that, what is left are the choices of ``smallest``, whose floor is.
    """
    if plan.space is None:
        return plan
    choices: Choices | None = plan.space.first()
    while choices is not None:
        need, binding = device_floor(plan.sketched(choices))
        if need <= budget.device_bytes:
            return plan.lowered(choices)
        choices = plan.space.leaner(choices, binding)
    return _whole(plan, smallest)


def _whole(plan: Plan, sketch: Plan) -> Plan:
    """Return the whole plan under the choices of a sketch of it."""
    if plan.space is None:
        return plan
    return plan.lowered({name: sketch.choices[name] for name in plan.space.first()})


def _refusal(stage: Stage, need: int, budget: Budget, *, has_choices: bool) -> str:
    where = at(stage.origin) if stage.declared_bytes is not None else ""  # a stage of a person's own
    smallest = " at the smallest choices" if has_choices else ""
    return (
        f"does not fit: stage {stage.name} needs {format_bytes(need)} ({need} bytes) on the device{smallest}, "
        f"the budget has {format_bytes(budget.device_bytes)} ({budget.device_bytes} bytes); "
        f"give --budget device={need} or more, or a smaller plan{where}"
    )


def _report(plan: Plan, binding_stage: str, smallest_bytes: int, budget: Budget) -> dict[str, object]:
    return {
        "feasible": False,
        "budget_bytes": budget.as_dict(),
        "binding_stage": binding_stage,
        "smallest_device_bytes": smallest_bytes,
        "num_stages": len(plan.stages),
        "choices": dict(plan.choices),
    }
