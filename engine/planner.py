"""From a plan and a budget to choices and a schedule: the fastest that fits.

A plan's `ChoiceSpace` has a ladder of values for every choice, from the fastest to the slowest. They make a lattice
(`engine.lattice`), which a `Planner` searches best-first by a bound that no budget improves on, the plan's compute
time, together with the leanest choices of all. It schedules what fits, and goes on while anything could still be faster
than the best so far. Where a stage does not fit, only the choices that change what that stage needs are pulled, so a
budget that is missed by a byte pulls the next lever.

Guarantees: what is found is the fastest of these that fits, as far as `make_schedule` schedules each; which they are
does not depend on the budget, so a larger one gives no slower plan; a plan that is refused for its device bytes fits
under no choice: ``smallest_device_bytes`` is the lowest floor of any of them.

Plans that repeat steps are judged by a sketch that has each kind of step once.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.budget import Budget, Tier
from engine.driver import drive
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile
from engine.lattice import Bounds, Frontier, Lattice, Place
from engine.origin import at
from engine.placement import Placement
from engine.plan import ActualSizes, Choices, ChoiceSpace, Plan, Stage
from engine.portfolio import Portfolio
from engine.schedule import Run, Schedule, best_placement, device_floor, write_down
from engine.simulated import SimulatedMachine, Uncounted
from engine.trace import PREDICTED, Recording
from engine.units import format_bytes

_LARGER_BUDGETS = (1.125, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
_WORTH_IT = 0.99
# Budgets that are offered beside one, by factor, and how much less time an offer must take than the one before it.


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A plan under chosen choices, its schedule, and what the simulator says of it; ``recording`` has the times.

    ``compute_s`` are the seconds of all arithmetic, ``transfer_s`` those of all transfers, hidden or not, and
    ``waited_s`` those by which transfers make the run longer.
    """

    plan: Plan
    budget: Budget
    schedule: Schedule
    peak_bytes: dict[Tier, int]
    makespan_s: float
    stage_s: dict[str, float]
    moved_bytes: dict[str, int]
    compute_s: float
    transfer_s: float
    waited_s: float
    smallest_device_bytes: int
    recording: Recording

    @property
    def bound(self) -> str:
        """What the time could not be below if all were hidden that can be: ``arithmetic``, or ``transfers``."""
        return "arithmetic" if self.compute_s >= self.transfer_s else "transfers"

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
            "compute_s": self.compute_s,
            "transfer_s": self.transfer_s,
            "waited_s": self.waited_s,
            "bound": self.bound,
            "moved_bytes": dict(self.moved_bytes),
            "num_stages": len(self.schedule.stages),
            "choices": dict(self.plan.choices),
            "notes": list(self.plan.notes),
        }


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector of reference cycles still: planning makes millions of small records, and no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation: a collection of millions as young ones would begin at once
            gc.enable()


def forecast(plan: Plan, budget: Budget, profile: HardwareProfile) -> Forecast:
    """Choose, schedule and simulate; see `Planner.forecast`."""
    return Planner(plan=plan, profile=profile).forecast(budget)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a device budget buys: the time of the plan, and the choices that take it."""

    device_bytes: int
    seconds: float
    choices: Choices

    def as_dict(self) -> dict[str, object]:
        """Return it as plain data."""
        return {"device_bytes": self.device_bytes, "makespan_s": self.seconds, "choices": dict(self.choices)}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The fastest choices within a budget, with where everything lives in the sketch that was judged."""

    sketch: Plan
    placement: Placement
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans one plan for given hardware, for one budget after another; what it has lowered it remembers.

    ``fixed`` are choices that are made already, by name: those of a run that goes on.
    """

    plan: Plan
    profile: HardwareProfile
    fixed: Choices = field(default_factory=dict)
    _lowered: dict[Hashable, Plan] = field(default_factory=dict, init=False, repr=False)
    _found: dict[Budget, Found] = field(default_factory=dict, init=False, repr=False)
    _portfolios: dict[int, Portfolio] = field(default_factory=dict, init=False, repr=False)  # each holds its plan

    def forecast(self, budget: Budget) -> Forecast:
        """Choose, schedule and simulate.

        Raises:
            DoesNotFitError: no declared choice fits; names the binding stage and the bytes it needs.
            PlanError: the plan is not well formed.
        """
        with collector_paused():
            found = self.best(budget)
            chosen = self._whole(found.sketch)
            placement, seconds = found.placement, found.seconds
            if chosen is not found.sketch:
                placement, seconds = self._placed(chosen, budget)
            schedule = write_down(placement, budget, seconds)
            return self._simulated(chosen, schedule, budget)

    def best(self, budget: Budget) -> Found:
        """Return the fastest choices within ``budget``. Raises DoesNotFitError as `forecast` does."""
        if budget not in self._found:
            self._found[budget] = self._search(budget)
        return self._found[budget]

    def _search(self, budget: Budget) -> Found:
        self._check_smallest(budget)
        frontier, best = Frontier(self._lattice, self._bounds), None
        for choices in self._leanest:  # some of them may lie beside the lattice
            frontier.add(self._least_s(choices), choices)
        refused: list[tuple[Choices, DoesNotFitError]] = []
        while (item := frontier.pop(math.inf if best is None else best.seconds)) is not None:
            if item.place is not None:
                self._look_further(frontier, item.place, budget, math.inf if best is None else best.seconds)
            elif self._floor(item.choices)[0] <= budget.device_bytes:
                compute_s = self._portfolio(self._sketch(item.choices)).own.clock.total_compute_s
                if compute_s > item.least_s:
                    frontier.put_back(compute_s, item.choices)
                else:
                    best = self._better(best, self._sketch(item.choices), budget, refused)
        if best is None:
            raise _none_fits(refused)
        return best

    def _look_further(self, frontier: Frontier, place: Place, budget: Budget, below_s: float) -> None:
        """Put in the choices at a place if they may take less than ``below_s``, and the places behind it.

        Where they do not fit, neither does what needs as much: only what changes the binding stage is looked at.
        """
        lattice, own_s = self._lattice, self._bounds.own_s[place]
        axes = lattice.every_axis
        if own_s < below_s:
            choices = lattice.choices(place)
            need, binding = self._floor(choices)
            if need > budget.device_bytes:
                axes = lattice.axes_of(self._levers(binding))
            else:
                frontier.add(own_s, choices)
        frontier.open_further(place, axes)

    @cached_property
    def _bounds(self) -> Bounds:
        return self._lattice.bounds(self._least_s)

    def _least_s(self, choices: Choices) -> float:
        """Return the least seconds that choices take; infinite where they are not declared."""
        space = self.plan.space
        if space is None:
            return 0.0
        if not space.declares(choices):
            return math.inf
        cost, num_stages = space.least_cost(choices)
        return self.profile.seconds(cost) + (num_stages - 1) * self.profile.stage_s

    def _better(
        self, best: Found | None, sketch: Plan, budget: Budget, refused: list[tuple[Choices, DoesNotFitError]]
    ) -> Found | None:
        """Return the faster of ``best`` and a sketch; one that host and disk have no room for is ``refused``."""
        try:
            placement, seconds = self._placed(sketch, budget)
        except DoesNotFitError as error:
            refused.append((sketch.choices, error))
            return best
        if best is not None and best.seconds <= seconds:
            return best
        return Found(sketch=sketch, placement=placement, seconds=seconds)

    def offers(self, forecast: Forecast) -> list[Offer]:
        """Return what device budgets buy beside that of a forecast: the Pareto front of bytes and time.

        It begins with the smallest budget that works; the forecast's own is always there, and larger ones as far as
        they buy something. Of a plan that repeats steps the seconds of the others are in proportion to its sketch's.
        """
        budget = forecast.budget
        mine_s = self.best(budget).seconds
        scale = forecast.makespan_s / mine_s if mine_s else 1.0
        sizes = [self.smallest[1], budget.device_bytes]
        sizes += [int(budget.device_bytes * factor) for factor in _LARGER_BUDGETS]
        found: list[Offer] = []
        for nbytes in sorted({size for size in sizes if size >= self.smallest[1]}):
            try:
                best = self.best(replace(budget, device_bytes=nbytes))
            except DoesNotFitError:  # what has to leave so small a device has no room elsewhere
                continue
            seconds = forecast.makespan_s if nbytes == budget.device_bytes else scale * best.seconds
            offer = Offer(device_bytes=nbytes, seconds=seconds, choices=dict(best.sketch.choices))
            if nbytes == budget.device_bytes or not found or offer.seconds < _WORTH_IT * found[-1].seconds:
                found.append(offer)
        return found

    @cached_property
    def smallest(self) -> tuple[Choices, int]:
        """The choices with the lowest device floor of all, and that floor in bytes."""
        return min(((choices, self._floor(choices)[0]) for choices in self._leanest), key=lambda found: found[1])

    @property
    def _leanest(self) -> list[Choices]:
        space = self.plan.space
        return [{}] if space is None else [{**choices, **self._fixed} for choices in space.leanest()]

    @property
    def smallest_stage(self) -> Stage:
        """The stage that needs the smallest device budget."""
        return device_floor(self.plan.lowered(self.smallest[0]))[1]

    @cached_property
    def _lattice(self) -> Lattice:
        gradual = () if self.plan.space is None else self.plan.space.gradual
        return Lattice(self._ladders, gradual, binding=lambda choices: self._levers(self._floor(choices)[1]))

    @cached_property
    def _ladders(self) -> Mapping[str, Sequence[int]]:
        return {**self.plan.ladders, **{name: (value,) for name, value in self._fixed.items()}}

    @property
    def _fixed(self) -> Choices:
        """Those of the fixed choices that the plan has."""
        return {name: value for name, value in self.fixed.items() if name in self.plan.ladders}

    def _levers(self, stage: Stage) -> Sequence[str]:
        return () if self.plan.space is None else self.plan.space.levers(stage)

    def _floor(self, choices: Choices) -> tuple[int, Stage]:
        """Return the device floor of the plan under ``choices``, and a stage like the one that needs it."""
        key = ("floor", *choices.items())
        if key not in self._lowered:
            self._lowered[key] = self.plan.outlined(choices)
        return self._portfolio(self._lowered[key]).own.needs.floor

    def _sketch(self, choices: Choices) -> Plan:
        key = ("sketch", *choices.items())
        if key not in self._lowered:
            self._lowered[key] = self.plan.sketched(choices)
        return self._lowered[key]

    def _whole(self, sketch: Plan) -> Plan:
        """Return the whole plan under the choices of a sketch of it."""
        if self.plan.space is None:
            return self.plan
        return self.plan.lowered({name: sketch.choices[name] for name in self._ladders})

    def _portfolio(self, plan: Plan) -> Portfolio:
        if id(plan) not in self._portfolios:
            self._portfolios[id(plan)] = Portfolio(plan=plan, profile=self.profile)
        return self._portfolios[id(plan)]

    def _placed(self, plan: Plan, budget: Budget) -> tuple[Placement, float]:
        try:
            return best_placement(self._portfolio(plan), budget)
        except DoesNotFitError as error:
            error.report = self._report(plan, budget) | error.report
            raise

    def _check_smallest(self, budget: Budget) -> None:
        choices, nbytes = self.smallest
        if nbytes > budget.device_bytes:
            whole = self.plan.lowered(choices)
            need, stage = device_floor(whole)
            refusal = _refusal(stage, need, budget, self.plan.space)
            found = {"binding_stage": stage.name, "tier": str(Tier.DEVICE)}
            besides = self._trouble_besides(choices, replace(budget, device_bytes=nbytes))
            raise DoesNotFitError(refusal + besides, report=self._report(whole, budget) | found)

    def _trouble_besides(self, choices: Choices, budget: Budget) -> str:
        """Say what else is too small once the device is large enough for ``choices``; nothing where all else fits."""
        try:
            self._placed(self._sketch(choices), budget)
        except DoesNotFitError as error:
            return f"; besides, on a device of so many bytes, {error}"
        return ""

    def _report(self, plan: Plan, budget: Budget) -> dict[str, object]:
        """Return what a refusal says as data; ``tier`` is the one that is too small."""
        return {
            "feasible": False,
            "budget_bytes": budget.as_dict(),
            "tier": "",
            "binding_stage": "",
            "smallest_device_bytes": self.smallest[1],
            "num_stages": len(plan.stages),
            "choices": dict(plan.choices),
        }

    def _simulated(self, plan: Plan, schedule: Schedule, budget: Budget) -> Forecast:
        machine = SimulatedMachine(plan, self.profile)
        recording = Recording(plan, budget, process=PREDICTED, clock=lambda: machine.clock_s)
        ledger = drive(plan, schedule, budget, machine, recorder=recording)
        recording.close()
        return Forecast(
            plan=plan,
            budget=budget,
            schedule=schedule,
            peak_bytes=dict(ledger.peak),
            makespan_s=machine.clock_s,
            stage_s=machine.stage_s,
            moved_bytes=dict(machine.moved_bytes),
            compute_s=machine.compute_s,
            transfer_s=machine.transfer_s,
            waited_s=machine.waited_s,
            smallest_device_bytes=self.smallest[1],
            recording=recording,
        )


def peak_bytes_at(forecast: Forecast, actual: ActualSizes) -> dict[Tier, int]:
    """Return the peaks of a schedule at the sizes that things turned out to have."""
    plan = replace(forecast.plan, values=forecast.plan.values | dict(actual.values))
    instructions = tuple(
        replace(item, workspace_bytes=actual.workspace_bytes[item.stage] + plan.kind.kept_bytes)
        if isinstance(item, Run) and item.stage in actual.workspace_bytes
        else item
        for item in forecast.schedule.instructions
    )
    ledger = drive(plan, replace(forecast.schedule, instructions=instructions), forecast.budget, Uncounted())
    return dict(ledger.peak)


def _none_fits(refused: Sequence[tuple[Choices, DoesNotFitError]]) -> DoesNotFitError:
    """Return the refusal of choices that fit the device, but neither host nor disk: that of the first, and how many."""
    choices, first = refused[0]
    if len(refused) == 1:
        return first
    told = ", ".join(f"{name} {value}" for name, value in choices.items())
    others = f"{len(refused) - 1} other choices that fit the device were tried and do not fit there either"
    return DoesNotFitError(f"{first} (with {told}; {others})", report=first.report)


def _refusal(stage: Stage, need: int, budget: Budget, space: ChoiceSpace | None) -> str:
    where = at(stage.origin) if stage.declared_bytes is not None else ""  # a stage of a person's own
    smallest = "" if space is None else " at the smallest choices"
    whole = "" if space is None or space.hindrance is None else f"; the model has to be there whole: {space.hindrance}"
    return (
        f"does not fit: stage {stage.name} needs {format_bytes(need)} ({need} bytes) on the device{smallest}, "
        f"the budget has {format_bytes(budget.device_bytes)} ({budget.device_bytes} bytes); "
        f"give --budget device={need} or more, or a smaller plan{where}{whole}"
    )
