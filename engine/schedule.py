"""When everything happens and where everything lives, decided ahead of time.

A *schedule* is a list of instructions. `make_schedule` takes the stages in the orders of `engine.portfolio`, lets
`engine.placer` choose where Values live in each, and writes down what follows of the fastest: before a stage, copies of
what it needs on the device; the stage; then what is stored and dropped.

A copy is either waited for, or it runs *alongside* the next stage and is complete when that stage is.

What is guaranteed: no tier's budget is ever exceeded; a plan whose `device_floor` is within the device budget gets a
schedule if host and disk have room, and one whose floor is not gets none; a larger budget never gives a slower
schedule; the same plan, budget and profile give the same schedule; changes of accumulators and ordered Values come in
program order, so that no bit depends on the schedule. What is not: that the schedule is the fastest one. How far it is
from that on small plans is measured by `python -m tests.benchmarks.schedule_against_optimum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile
from engine.ledger import Ledger
from engine.needs import Needs, needs_of
from engine.placement import Event, Placement, Step
from engine.placer import Placer
from engine.plan import Plan, Stage
from engine.portfolio import Portfolio
from engine.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Create:
    """Bring a Value to life on a tier, zero."""

    value: str
    tier: Tier


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Copy a Value from one tier to another, where a copy is made if there is none (a fetch or a store).

    With ``alongside`` it runs while the next stage does, and is complete when that is.
    """

    value: str
    source: Tier
    target: Tier
    alongside: bool = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a stage; ``buffer_bytes`` are those of its streams, ``workspace_bytes`` its own.

    Each of its streams passes through ``slots`` buffers of one piece: with two, the next piece comes while one is used.
    ``streamed_bytes`` is what comes and goes through them.
    """

    stage: str
    workspace_bytes: int
    buffer_bytes: int
    slots: int = 1
    streamed_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Free the copy of a Value on a tier."""

    value: str
    tier: Tier


Instruction = Create | Copy | Run | Drop

STAGING_ENTRY = "disk staging buffer"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An ordered list of instructions for one worker, and what it takes.

    ``staging_bytes`` of host memory are held throughout where the disk is used; ``binding_stage`` is the stage during
    which the device peak is reached; ``seconds`` is the time that it takes on the hardware it was made for.
    """

    instructions: tuple[Instruction, ...]
    stages: tuple[Stage, ...]
    staging_bytes: int
    peak_bytes: dict[Tier, int]
    binding_stage: str
    seconds: float


def filled_tier(instruction: Instruction) -> Tier | None:
    """Return the tier that an instruction puts a Value on; None for one that puts none anywhere."""
    match instruction:
        case Create(tier=tier) | Copy(target=tier):
            return tier
    return None


def begin(ledger: Ledger, plan: Plan, instruction: Instruction) -> None:
    """Count what an instruction adds. Raises DoesNotFitError if that is too much."""
    if isinstance(instruction, Create):
        value, tier = plan.values[instruction.value], instruction.tier
        ledger.add(tier, value.name, plan.bytes_on(tier, value))
    elif isinstance(instruction, Copy):
        value, tier = plan.values[instruction.value], instruction.target
        if not ledger.has(tier, value.name):
            ledger.add(tier, value.name, plan.bytes_on(tier, value))
    elif isinstance(instruction, Run):
        ledger.add(Tier.DEVICE, _workspace_entry(instruction), instruction.workspace_bytes + instruction.buffer_bytes)


def end(ledger: Ledger, instruction: Instruction) -> None:
    """Uncount what an instruction leaves behind."""
    if isinstance(instruction, Run):
        ledger.remove(Tier.DEVICE, _workspace_entry(instruction))
    elif isinstance(instruction, Drop):
        ledger.remove(instruction.tier, instruction.value)


def _workspace_entry(run: Run) -> str:
    return f"workspace of {run.stage}"


def device_floor(plan: Plan) -> tuple[int, Stage]:
    """Return the fewest device bytes that any schedule of ``plan`` needs, and the stage that needs them.

    Proof: while a stage runs, its resident Values, its workspace, and every live Value that may live on the device
    only are on the device whatever the schedule does. A stream of Values that may leave needs its buffer, which is
    its largest piece, or has the Value with that piece there instead, which is no smaller; no Value is in two
    buffered streams of a stage, or resident and in one. `make_schedule` reaches the bound where host and disk have
    room, since everything else can leave.
    """
    return needs_of(plan, plan.ordered()).floor


def staging_need(plan: Plan) -> int:
    """Return the host bytes through which Values pass between device and disk: the largest piece of any of them.

    Where the device's memory is not the CPU's there are two: what a stage writes row by row, and what is on its way.
    """
    through = [value for value in plan.values.values() if value.is_stored]
    return (2 if plan.kind.bounces else 1) * max([value.largest_piece_bytes for value in through], default=0)


def make_schedule(plan: Plan, budget: Budget, profile: HardwareProfile) -> Schedule:
    """Return the fastest schedule of ``plan`` within ``budget`` that is found for hardware of ``profile``.

    Raises:
        DoesNotFitError: there is none, or host and disk are too small for what has to leave the device.
        PlanError: the plan is not well formed.
    """
    placement, seconds = best_placement(Portfolio(plan=plan, profile=profile), budget)
    return write_down(placement, budget, seconds)


Timed = tuple[Placement, float]
# A placement, and the seconds of the plan under it.


def best_placement(portfolio: Portfolio, budget: Budget) -> Timed:
    """Return the fastest placement that is found in any order, with its time."""
    _check_device(portfolio.own.needs.floor, budget)
    tries = (partial(best_in_order, placer, budget) for placer in portfolio.placers())
    return _fastest(tries, portfolio.own.clock.total_compute_s)


def best_in_order(placer: Placer, budget: Budget) -> Timed:
    """Return the fastest placement that is found in the order of a placer, with its time."""
    staging_bytes = staging_need(placer.needs.plan)

    def timed(candidate: Placement) -> Timed:
        placement = placer.housed(candidate, budget, staging_bytes)
        return placement, placer.clock.seconds(placement)

    tries = (partial(timed, candidate) for candidate in placer.candidates(budget.device_bytes))
    return _fastest(tries, placer.clock.total_compute_s)


def _fastest(tries: Iterable[Callable[[], Timed]], least_s: float) -> Timed:
    """Return the fastest of what ``tries`` find, which no more are made of once one takes ``least_s``.

    Raises:
        DoesNotFitError: all of them raised that; it is the first one's.
    """
    best: Timed | None = None
    refusal: DoesNotFitError | None = None
    for attempt in tries:
        try:
            found = attempt()
        except DoesNotFitError as error:
            refusal = refusal or error
            continue
        if best is None or found[1] < best[1]:
            best = found
        if best[1] <= least_s:
            break
    if best is None:
        raise refusal or DoesNotFitError("no schedule was found")
    return best


def _check_device(floor: tuple[int, Stage], budget: Budget) -> None:
    least_bytes, stage = floor
    if least_bytes > budget.device_bytes:
        raise DoesNotFitError(
            f"stage {stage.name} needs {format_bytes(least_bytes)} ({least_bytes} bytes) on the device, with "
            f"all that has to stay there; the budget is {format_bytes(budget.device_bytes)}",
            report={"binding_stage": stage.name, "tier": str(Tier.DEVICE)},
        )


def write_down(placement: Placement, budget: Budget, seconds: float) -> Schedule:
    """Return the schedule of a placement, counted by a ledger."""
    needs, ledger, binding, most = placement.needs, Ledger(budget), "", -1
    if placement.staging_bytes:
        ledger.add(Tier.HOST, STAGING_ENTRY, placement.staging_bytes)
    instructions = list(_instructions(placement))
    for instruction in instructions:
        begin(ledger, needs.plan, instruction)
        if isinstance(instruction, Run) and ledger.live[Tier.DEVICE] > most:
            binding, most = instruction.stage, ledger.live[Tier.DEVICE]
        end(ledger, instruction)
    return Schedule(
        instructions=tuple(instructions),
        stages=needs.stages,
        staging_bytes=placement.staging_bytes,
        peak_bytes=dict(ledger.peak),
        binding_stage=binding,
        seconds=seconds,
    )


def _instructions(placement: Placement) -> Iterator[Instruction]:
    needs = placement.needs
    steps: list[list[Step]] = [[] for _ in needs.stages]
    for number in range(len(needs.names)):
        for step in placement.steps_of(number):
            steps[step.stage].append(step)
    here: set[str] = set()
    streamed_bytes = placement.streamed_bytes.tolist()
    for number, (stage, mine) in enumerate(zip(needs.stages, steps, strict=True)):
        mine.sort(key=_rank)
        for step in (step for step in mine if step.before):
            yield _instruction(needs, placement, step)
            if not step.at_home:
                here.add(needs.names[step.value])
        slots = 2 if number in placement.doubled else 1
        yield _run(needs.plan, stage, here, slots=slots, streamed_bytes=streamed_bytes[number])
        for step in (step for step in mine if not step.before):
            yield _instruction(needs, placement, step)
            if step.event is Event.DROP and not step.at_home:
                here.discard(needs.names[step.value])


def _rank(step: Step) -> tuple[bool, int, int]:
    """Order the steps around a stage: what is waited for first, what runs alongside last; room is made before it is
    taken again."""
    if step.before:
        return (False, 2 * step.alongside + (step.event is Event.FETCH), step.value)
    makes_room_below = step.event is Event.DROP and step.at_home
    return (True, 0 if makes_room_below else 1 if step.event is Event.STORE else 2, step.value)


def _instruction(needs: Needs, placement: Placement, step: Step) -> Instruction:
    name = needs.names[step.value]
    tier = placement.home(step.value) if step.at_home or step.event is Event.FETCH else Tier.DEVICE
    match step.event:
        case Event.CREATE:
            return Create(value=name, tier=tier)
        case Event.FETCH:
            return Copy(value=name, source=tier, target=Tier.DEVICE, alongside=step.alongside)
        case Event.STORE:
            return Copy(value=name, source=Tier.DEVICE, target=tier, alongside=step.alongside)
        case Event.DROP:
            return Drop(value=name, tier=tier)


def _run(plan: Plan, stage: Stage, here: set[str], *, slots: int, streamed_bytes: int) -> Run:
    """Return the instruction that runs a stage; streams whose Values are all ``here`` need no buffer."""
    away = [stream for stream in stage.streams if not here.issuperset(stream.values)]
    return Run(
        stage=stage.name,
        workspace_bytes=plan.workspace_bytes(stage),
        buffer_bytes=slots * sum(plan.buffer_bytes(stream) for stream in away),
        slots=slots if away else 1,
        streamed_bytes=streamed_bytes,
    )
