"""Schedules of random plans: what the scheduler promises, checked by accounting that shares no code with it.

Three parties look at one random plan. The scheduler makes an instruction list; `replay` here counts it by brute force
(no `Ledger`); the simulated and the real machine carry it out. All must agree to the byte, and the real one must
compute the same bits wherever its Values live.
"""

from __future__ import annotations

import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.driver import Machine, drive
from engine.errors import DoesNotFitError
from engine.hardware import HardwareProfile
from engine.plan import ALL_TIERS, Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.recipe import recipe_keys
from engine.schedule import Copy, Create, Drop, Instruction, Run, Schedule, device_floor, make_schedule, staging_need
from engine.simulated import SimulatedMachine

if TYPE_CHECKING:
    from engine.context import StageContext
    from engine.memory import LiveBytes
    from engine.worker import TorchMachine

DTYPES = ("float32", "float64", "bfloat16")
TIERS = (ALL_TIERS, ALL_TIERS, ALL_TIERS, (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.DISK))
TIERS_OF_STREAMS = (*TIERS, (Tier.HOST, Tier.DISK))
# What is never on the device can only be streamed.
SECONDS = HardwareProfile(
    name="slow links", flops_per_s=1.0, attention_flops_per_s=1.0, attention_backward_flops_per_s=1.0,
    attention_scores_per_s=1.0, memory_bytes_per_s=1.0, weight_bytes_per_s=1.0, kernel_s=1.0, stage_s=0.0,
    host_link_bytes_per_s=100.0, fresh_bytes_per_s=200.0, copy_s=0.0, disk_read_bytes_per_s=40.0,
    disk_write_bytes_per_s=40.0, file_s=0.0,
    array_s=0.3, saved_bytes_per_s=40.0, overlap=0.7,
)  # fmt: skip
# Transfers take about as long as stages, so that where things live matters.
FAST_FILES = replace(
    SECONDS,
    name="fast files",
    fresh_bytes_per_s=20.0,
    disk_read_bytes_per_s=1e6,
    disk_write_bytes_per_s=1e6,
    array_s=0.0,
)
# As with a cache of files in memory that is there already, while other memory is taken anew.
SCRATCH_BYTES = 64
# A stage's workspace holds at least this: the largest part of a piece below is 4 x 4 float32 or 2 x 4 float64.


# Random plans


@dataclass
class Story:
    """How far a Value has come in program order."""

    value: Value
    paged: bool
    born: bool = False
    closed: bool = False  # an accumulator that has been read


def random_value(rng: random.Random, name: str) -> Story:
    paged = rng.random() < 0.5
    dtype = rng.choice(DTYPES)
    if paged:
        rows, columns = (rng.randint(1, 4), rng.randint(1, 4)) if dtype != "float64" else (rng.randint(1, 2), 4)
        tensors = {"pages": TensorSpec(shape=(rng.randint(1, 4), rng.randint(1, 2), rows, columns), dtype=dtype)}
    else:
        tensors = {
            f"t{i}": TensorSpec(shape=tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3))), dtype=dtype)
            for i in range(rng.randint(1, 3))
        }
    value = Value(
        name=name,
        tensors=tensors,
        kind=rng.choice(list(ValueKind)),
        tiers=rng.choice(TIERS_OF_STREAMS if paged else TIERS),
        keep=rng.random() < 0.15,
    )
    return Story(value, paged)


def change_or_read(rng: random.Random, story: Story) -> bool:
    """Say whether the next stage that meets this Value changes it, and note that it did."""
    kind = story.value.kind
    changes = not story.born
    if story.born and kind is ValueKind.ORDERED:
        changes = rng.random() < 0.5
    elif story.born and kind is ValueKind.ACCUMULATOR and not story.closed:
        changes = rng.random() < 0.7
        story.closed = not changes
    story.born = True
    return changes


def random_streams(rng: random.Random, names: list[str], plan: Plan, *, updates: bool) -> list[Stream]:
    groups = [names] if rng.random() < 0.5 else [names[: len(names) // 2], names[len(names) // 2 :]]
    return [Stream(values=tuple(group), updates=updates) for group in groups if group]


def random_stage(rng: random.Random, plan: Plan, stories: list[Story], name: str) -> Stage:
    reads: list[str] = []
    writes: list[str] = []
    updates: list[str] = []
    streamed_in: list[str] = []
    streamed_out: list[str] = []
    for story in rng.sample(stories, min(len(stories), rng.randint(1, 4))):
        value, was_born = story.value, story.born
        streams = story.paged and (Tier.DEVICE not in value.tiers or rng.random() < 0.7)
        changes = change_or_read(rng, story)
        if streams:
            (streamed_out if changes else streamed_in).append(value.name)
        elif not changes:
            reads.append(value.name)
        else:
            (updates if was_born else writes).append(value.name)
    return Stage(
        name=name,
        kind="work",
        run=touch,
        config={"number": name},
        reads=tuple(reads),
        writes=tuple(writes),
        updates=tuple(updates),
        streams=(
            *random_streams(rng, streamed_in, plan, updates=False),
            *random_streams(rng, streamed_out, plan, updates=True),
        ),
        workspace_bytes=SCRATCH_BYTES + 8 * rng.randint(0, 30),
        cost=Cost(flops=float(rng.randint(0, 20))),
    )


def swapped(rng: random.Random, stages: list[Stage], plan: Plan) -> list[Stage]:
    """Insert stages in another order than that of the data, where only immutable Values tie them."""
    result = list(stages)
    for index in [rng.randrange(len(stages) - 1) for _ in range(rng.choice((0, 0, 5)))]:
        first, second = result[index : index + 2]
        shared = set(first.used) & set(second.used)
        if all(plan.values[name].kind is ValueKind.IMMUTABLE for name in shared):
            result[index : index + 2] = [second, first]
    return result


@st.composite
def random_plans(draw: st.DrawFn, most_stages: int = 25) -> Plan:
    rng = draw(st.randoms(use_true_random=False))
    plan = Plan(name="random")
    stories = [random_value(rng, f"v{index}") for index in range(draw(st.integers(1, 9)))]
    for story in stories:
        plan.value(story.value)
    stages = [random_stage(rng, plan, stories, f"s{index}") for index in range(draw(st.integers(3, most_stages)))]
    for stage in swapped(rng, stages, plan):
        plan.add(stage)
    return plan


def total_bytes(plan: Plan) -> int:
    return sum(value.nbytes for value in plan.values.values())


@st.composite
def budgets(draw: st.DrawFn, plan: Plan) -> Budget:
    """Budgets from hopeless to generous, with the interesting figures likely."""
    floor, total, staging = device_floor(plan)[0], total_bytes(plan), staging_need(plan)
    lower = st.one_of(st.just(0), st.just(staging), st.integers(0, total + staging), st.just(UNLIMITED_BYTES))
    device = st.one_of(st.just(floor), st.integers(floor, floor + total), st.just(UNLIMITED_BYTES))
    return Budget(device_bytes=draw(device), host_bytes=draw(lower), disk_bytes=draw(lower))


@st.composite
def larger_budgets(draw: st.DrawFn, plan: Plan, budget: Budget) -> Budget:
    """Budgets with no less on any tier."""
    more = st.one_of(st.just(0), st.integers(0, total_bytes(plan)))
    return Budget(
        device_bytes=budget.device_bytes + draw(more),
        host_bytes=budget.host_bytes + draw(more),
        disk_bytes=budget.disk_bytes + draw(more),
    )


def scheduled(plan: Plan, budget: Budget, profile: HardwareProfile = SECONDS) -> Schedule | None:
    try:
        return make_schedule(plan, budget, profile)
    except DoesNotFitError:
        return None


# The independent accounting


class Replay:
    """Follows a schedule with a set of places per Value and adds up everything anew at each instruction."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule = plan, schedule
        self.where: dict[str, set[Tier]] = {}
        self.newest: dict[str, set[Tier]] = {}  # the copies that have what the Value is
        self.alongside: set[str] = set()
        self.ran: list[str] = []
        self.peak = dict.fromkeys(Tier, 0)
        self.during: dict[str, int] = {}
        self._count()
        for instruction in schedule.instructions:
            self._follow(instruction)
        assert not self.alongside, "a copy was never complete"

    def _count(self, extra: dict[Tier, int] | None = None) -> dict[Tier, int]:
        live = {
            tier: sum(self.plan.values[name].nbytes for name, places in self.where.items() if tier in places)
            + (self.schedule.staging_bytes if tier is Tier.HOST else 0)
            + (extra or {}).get(tier, 0)
            for tier in Tier
        }
        self.peak = {tier: max(self.peak[tier], live[tier]) for tier in Tier}
        return live

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Create(value=name, tier=tier):
                assert name not in self.where, f"{name} is created twice"
                self._settle(name, tier)
                self.newest[name] = {tier}
            case Copy(value=name, source=source, target=target):
                assert source in self.newest[name], f"{name} is copied from a place where it is out of date"
                self._settle(name, target)
                self.newest[name].add(target)
                if instruction.alongside:
                    self.alongside.add(name)
            case Drop(value=name, tier=tier):
                assert name not in self.alongside
                self.where[name].remove(tier)
                self.newest[name].discard(tier)
            case Run(stage=name):
                self._run(self.plan.stages[name], instruction)
        self._count()

    def _settle(self, name: str, tier: Tier) -> None:
        assert tier in self.plan.values[name].tiers, f"{name} may not live on {tier}"
        self.where.setdefault(name, set()).add(tier)

    def _run(self, stage: Stage, instruction: Run) -> None:
        for name in stage.resident():
            assert Tier.DEVICE in self.where[name], f"{stage.name} does not find {name} on the device"
        for name in stage.used:
            place = Tier.DEVICE if Tier.DEVICE in self.where[name] else next(iter(self.where[name]))
            assert place in self.newest[name], f"{stage.name} finds {name} out of date"
            assert name not in self.alongside, f"{stage.name} uses {name} while it is copied"
            if name in stage.changed:
                self.newest[name] = {place}
        buffers = instruction.slots * sum(
            self._largest_movable_piece(stream.values)
            for stream in stage.streams
            if any(Tier.DEVICE not in self.where[name] for name in stream.values)
        )
        assert (instruction.workspace_bytes, instruction.buffer_bytes) == (stage.workspace_bytes, buffers)
        self.during[stage.name] = self._count({Tier.DEVICE: buffers + stage.workspace_bytes})[Tier.DEVICE]
        self.ran.append(stage.name)
        self.alongside.clear()

    def _largest_movable_piece(self, names: tuple[str, ...]) -> int:
        movable = [self.plan.values[name] for name in names if self.plan.values[name].tiers != (Tier.DEVICE,)]
        return max(value.tensors["pages"].piece_bytes for value in movable)


def replay(plan: Plan, schedule: Schedule) -> Replay:
    return Replay(plan, schedule)


def exceeds(peak: dict[Tier, int], budget: Budget) -> list[Tier]:
    return [tier for tier in Tier if peak[tier] > budget[tier]]


# What every schedule does


@given(data=st.data(), plan=random_plans())
@settings(max_examples=80)
def test_no_schedule_ever_has_more_bytes_on_a_tier_than_its_budget(data: st.DataObject, plan: Plan) -> None:
    budget = data.draw(budgets(plan))
    schedule = scheduled(plan, budget)
    assume(schedule is not None)
    assert schedule is not None
    assert exceeds(replay(plan, schedule).peak, budget) == []


@given(data=st.data(), plan=random_plans())
@settings(max_examples=60)
def test_every_value_is_there_for_its_stages_and_nothing_is_left_but_what_is_kept(
    data: st.DataObject, plan: Plan
) -> None:
    schedule = scheduled(plan, data.draw(budgets(plan)))
    assume(schedule is not None)
    assert schedule is not None
    seen = replay(plan, schedule)
    used = {name for stage in plan.stages.values() for name in stage.used}
    left = {name for name, places in seen.where.items() if places}
    assert left == {name for name in used if plan.values[name].keep}
    assert set(seen.where) == used
    assert seen.ran == [stage.name for stage in schedule.stages]
    place = {name: index for index, name in enumerate(seen.ran)}
    assert place.keys() == plan.stages.keys()
    assert all(place[before] < place[after] for before, after in plan.graph().edges)


@given(data=st.data(), plan=random_plans())
@settings(max_examples=60)
def test_the_simulator_reaches_the_peaks_that_the_schedule_states_and_brute_force_counts(
    data: st.DataObject, plan: Plan
) -> None:
    budget = data.draw(budgets(plan))
    schedule = scheduled(plan, budget)
    assume(schedule is not None)
    assert schedule is not None
    seen = replay(plan, schedule)
    machine = SimulatedMachine(plan, SECONDS)
    ledger = drive(plan, schedule, budget, machine)
    assert ledger.peak == seen.peak == schedule.peak_bytes
    assert machine.clock_s == pytest.approx(schedule.seconds, rel=1e-12)
    assert seen.during[schedule.binding_stage] == max(seen.during.values())


@given(data=st.data(), plan=random_plans())
@settings(max_examples=30)
def test_a_host_buffer_is_reserved_exactly_where_the_disk_is_used(data: st.DataObject, plan: Plan) -> None:
    schedule = scheduled(plan, data.draw(budgets(plan)))
    assume(schedule is not None)
    assert schedule is not None
    on_disk = {
        item.value
        for item in schedule.instructions
        if (isinstance(item, Create) and item.tier is Tier.DISK)
        or (isinstance(item, Copy) and item.target is Tier.DISK)
    }
    pieces = [spec.piece_bytes for name in on_disk for spec in plan.values[name].tensors.values()]
    assert schedule.staging_bytes >= max(pieces, default=0)
    assert bool(schedule.staging_bytes) == bool(on_disk)


@given(data=st.data(), plan=random_plans())
@settings(max_examples=60)
def test_recipe_keys_are_the_same_in_whatever_order_stages_are_scheduled(data: st.DataObject, plan: Plan) -> None:
    schedule = scheduled(plan, data.draw(budgets(plan)))
    assume(schedule is not None)
    assert schedule is not None
    assert recipe_keys(schedule.stages, "1") == recipe_keys(plan.ordered(), "1")


# What fits and what does not


@given(data=st.data(), plan=random_plans())
@settings(max_examples=80)
def test_no_schedule_stays_below_the_device_floor(data: st.DataObject, plan: Plan) -> None:
    floor, binding = device_floor(plan)
    schedule = scheduled(plan, data.draw(budgets(plan)))
    if schedule is not None:
        seen = replay(plan, schedule)
        assert seen.peak[Tier.DEVICE] >= floor
        assert seen.during[binding.name] >= floor
    below = data.draw(st.one_of(st.just(floor - 1), st.integers(0, floor - 1)))
    assert scheduled(plan, Budget(device_bytes=below, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)) is None


@given(plan=random_plans())
@settings(max_examples=150)
def test_exactly_the_device_floor_is_enough_where_host_and_disk_have_room(plan: Plan) -> None:
    floor, _ = device_floor(plan)
    budget = Budget(device_bytes=floor, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    assert replay(plan, make_schedule(plan, budget, SECONDS)).peak[Tier.DEVICE] == floor


@given(data=st.data(), plan=random_plans())
@settings(max_examples=80)
def test_more_device_bytes_never_refuse_what_fewer_accepted_where_host_and_disk_have_room(
    data: st.DataObject, plan: Plan
) -> None:
    floor, _ = device_floor(plan)
    small = data.draw(st.integers(floor, floor + total_bytes(plan)))
    large = data.draw(st.integers(small, 2 * small + total_bytes(plan)))
    for nbytes in (small, large):
        make_schedule(
            plan, Budget(device_bytes=nbytes, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES), SECONDS
        )


@given(data=st.data(), plan=random_plans())
@settings(max_examples=150)
def test_a_bigger_budget_never_refuses_what_a_smaller_one_accepted_and_is_never_slower(
    data: st.DataObject, plan: Plan
) -> None:
    budget = data.draw(budgets(plan))
    schedule = scheduled(plan, budget)
    assume(schedule is not None)
    bigger = data.draw(larger_budgets(plan, budget))
    assert schedule is not None
    assert make_schedule(plan, bigger, SECONDS).seconds <= schedule.seconds * (1 + 1e-12)


@given(data=st.data(), plan=random_plans())
@settings(max_examples=50)
def test_more_of_the_host_is_never_slower_however_fast_files_are(data: st.DataObject, plan: Plan) -> None:
    staging, spare = staging_need(plan), st.integers(0, total_bytes(plan))
    device_bytes = device_floor(plan)[0] + data.draw(spare) // 4
    less, more = (
        Budget(device_bytes=device_bytes, host_bytes=staging + host_bytes, disk_bytes=UNLIMITED_BYTES)
        for host_bytes in sorted(data.draw(st.tuples(spare, spare)))
    )
    schedule = scheduled(plan, less, FAST_FILES)
    assume(schedule is not None)
    assert schedule is not None
    assert make_schedule(plan, more, FAST_FILES).seconds <= schedule.seconds * (1 + 1e-12)


@given(data=st.data(), plan=random_plans())
@settings(max_examples=25)
def test_the_same_plan_and_budget_give_the_same_schedule(data: st.DataObject, plan: Plan) -> None:
    budget = data.draw(budgets(plan))
    assert scheduled(plan, budget) == scheduled(plan, budget)


# The same plans, executed


def touch(context: StageContext) -> None:
    """Read all that the stage names, change what it may change, allocate exactly the workspace; keep checksums.

    Buffers come to life first and the workspace after them, so all that was planned is live at once.
    """
    import torch

    stage, plan = context.stage, context._machine.plan
    checks = [
        crc(context.piece(name, index))
        for stream in stage.streams
        for name in stream.values
        for index in range(plan.values[name].tensors["pages"].shape[0])
    ]
    scratch = torch.empty(stage.workspace_bytes, dtype=torch.uint8)
    checks += [crc(tensor) for name in stage.resident() for tensor in context.tensors(name).values()]
    rng = random.Random(f"{stage.name} {checks}")
    for name in (*stage.writes, *stage.updates):
        for tensor in context.tensors(name).values():
            for index in range(tensor.shape[0]):
                tensor[index].add_(rng.randint(-9, 9) / 8)
            checks.append(crc(tensor))
    for stream in stage.streams:
        for name in stream.values if stream.updates else ():
            checks += list(change_pages(context, name, scratch, rng))
    context.results[stage.name] = checks


def change_pages(context: StageContext, name: str, scratch: Any, rng: random.Random) -> Iterator[int]:
    """Add or write some rows of some pieces; the numbers come through the workspace, so nothing else is allocated."""
    from engine.tensors import torch_dtype

    spec = context._machine.plan.values[name].tensors["pages"]
    num_pieces, num_parts, tokens, width = spec.shape
    for index in range(num_pieces):
        if rng.random() < 0.3:
            continue
        start = rng.randrange(tokens)
        rows = rng.randint(1, tokens - start)
        item_bytes = spec.nbytes // (num_pieces * num_parts * tokens * width)
        part = scratch[: rows * width * item_bytes].view(torch_dtype(spec.dtype)).view(rows, width)
        part.fill_(rng.randint(-9, 9) / 8)
        change = context.add_rows if rng.random() < 0.5 else context.write_rows
        change(name, index, start, [part] * num_parts)
        yield crc(context.piece(name, index))


def crc(tensor: Any) -> int:
    """Checksum of a tensor's bytes, read where they lie: nothing is allocated that a meter could see."""
    import torch

    return zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())


@dataclass(kw_only=True)
class Measured:
    """What one execution left: every stage's checksums and the peaks."""

    results: dict[str, list[int]]
    measured: dict[Tier, int]
    planned: dict[Tier, int]
    live_after: dict[str, int]


def real_machine(plan: Plan, folder: Path) -> tuple[TorchMachine, LiveBytes]:
    from engine.memory import LiveBytes
    from engine.store import Store
    from engine.worker import TorchMachine

    meter = LiveBytes()
    return TorchMachine(plan, meter=meter, store=Store.create(folder / "store"), directory=folder), meter


def execute(plan: Plan, budget: Budget, schedule: Schedule) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        machine, meter = real_machine(plan, Path(folder))
        with meter:
            ledger = drive(plan, schedule, budget, machine)
        assert machine.store is not None
        measured = {
            Tier.DEVICE: meter.peak["device"],
            Tier.HOST: meter.peak["host"],
            Tier.DISK: machine.store.peak_bytes,
        }
        results = machine.results
        del machine  # no cycle holds it: what it held is freed here, without the collector
    return Measured(results=results, measured=measured, planned=ledger.peak, live_after=dict(meter.live))


def placements(data: st.DataObject, plan: Plan) -> list[tuple[Budget, Schedule]]:
    """Budgets that put the plan on the device, on the host, on the disk, and somewhere between."""
    floor, staging = device_floor(plan)[0], staging_need(plan)
    tried = [
        unlimited(),
        Budget(device_bytes=floor, host_bytes=UNLIMITED_BYTES, disk_bytes=0),
        Budget(device_bytes=floor, host_bytes=staging, disk_bytes=UNLIMITED_BYTES),
        data.draw(budgets(plan)),
    ]
    return [(budget, schedule) for budget in tried if (schedule := scheduled(plan, budget)) is not None]


@given(data=st.data(), plan=random_plans(most_stages=16))
@settings(max_examples=25)
def test_budget_and_placement_change_no_bit_and_measured_peaks_are_the_planned_ones(
    data: st.DataObject, plan: Plan
) -> None:
    reference = execute(plan, unlimited(), make_schedule(plan, unlimited(), SECONDS))
    for budget, schedule in placements(data, plan):
        found = execute(plan, budget, schedule)
        assert found.results == reference.results
        for tier in (Tier.DEVICE, Tier.HOST):
            assert found.measured[tier] == found.planned[tier], tier
        assert found.live_after == {"device": 0, "host": 0}


@given(plan=random_plans(most_stages=16))
@settings(max_examples=25)
def test_the_disk_never_holds_more_than_was_planned_for_it(plan: Plan) -> None:
    budget = Budget(device_bytes=device_floor(plan)[0], host_bytes=staging_need(plan), disk_bytes=UNLIMITED_BYTES)
    schedule = scheduled(plan, budget)
    assume(schedule is not None and schedule.staging_bytes)
    assert schedule is not None
    found = execute(plan, budget, schedule)
    assert found.measured[Tier.DISK] <= found.planned[Tier.DISK]


def finishes(plan: Plan, schedule: Schedule, budget: Budget, machine: Machine) -> bool:
    try:
        drive(plan, schedule, budget, machine)
    except DoesNotFitError:
        return False
    return True


@given(data=st.data(), plan=random_plans(most_stages=8))
@settings(max_examples=20)
def test_the_runtime_finishes_exactly_the_schedules_that_the_simulator_accepts(data: st.DataObject, plan: Plan) -> None:
    schedule = make_schedule(plan, data.draw(st.sampled_from(placements(data, plan)))[0], SECONDS)
    peak = schedule.peak_bytes
    near = st.integers(-1, 1)
    budget = Budget(
        device_bytes=max(0, peak[Tier.DEVICE] + data.draw(near)),
        host_bytes=max(0, peak[Tier.HOST] + data.draw(near)),
        disk_bytes=max(0, peak[Tier.DISK] + data.draw(near)),
    )
    with tempfile.TemporaryDirectory() as folder:
        machine, meter = real_machine(plan, Path(folder))
        with meter:
            real = finishes(plan, schedule, budget, machine)
    simulated = finishes(plan, schedule, budget, SimulatedMachine(plan, SECONDS))
    assert real == simulated == (exceeds(peak, budget) == [])


# Single cases that a random plan meets too seldom


def page_plan(*stages: Stage, **values: tuple[Tier, ...]) -> Plan:
    plan = Plan(name="pages")
    for name, tiers in values.items():
        spec = TensorSpec(shape=(4, 1, 4, 4), dtype="float32")  # four pieces of 64 bytes
        plan.value(Value(name=name, tensors={"pages": spec}, kind=ValueKind.ORDERED, tiers=tiers))
    for stage in stages:
        plan.add(stage)
    return plan


def streaming(name: str, *values: str) -> Stage:
    """A stage with one stream of ``values``."""
    streams = (Stream(values=values, updates=True),)
    return Stage(name=name, kind="work", run=touch, streams=streams, workspace_bytes=SCRATCH_BYTES)


FLOORS: dict[str, tuple[Callable[[], Plan], int]] = {
    # A stream that is all pinned has its Value there, and no buffer.
    "pinned": (lambda: page_plan(streaming("a", "p"), p=(Tier.DEVICE,)), 256 + SCRATCH_BYTES),
    # Born together: the pinned one stays, the movable one streams.
    "pinned with movable": (
        lambda: page_plan(streaming("a", "m", "p"), m=ALL_TIERS, p=(Tier.DEVICE,)),
        256 + 64 + SCRATCH_BYTES,
    ),
    # The movable one is there already and has to make room for the pinned one.
    "pinned after movable": (
        lambda: page_plan(streaming("a", "m"), streaming("b", "p"), streaming("c", "m"), m=ALL_TIERS, p=(Tier.DEVICE,)),
        256 + SCRATCH_BYTES,
    ),
    # What is never on the device always needs its buffer.
    "never on the device": (lambda: page_plan(streaming("a", "m"), m=(Tier.HOST, Tier.DISK)), 64 + SCRATCH_BYTES),
}


@pytest.mark.parametrize("case", FLOORS)
def test_the_device_floor_of_a_streaming_plan_is_the_known_one_and_is_reached(case: str) -> None:
    make, floor = FLOORS[case]
    plan = make()
    assert device_floor(plan)[0] == floor
    budget = Budget(device_bytes=floor, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)
    assert replay(plan, make_schedule(plan, budget, SECONDS)).peak[Tier.DEVICE] == floor


def test_one_more_device_byte_refuses_nothing_where_the_host_is_small() -> None:
    plan = Plan(name="small host")
    for name, nbytes, tiers in (
        ("v0", 4, (Tier.DEVICE, Tier.HOST)),
        ("v1", 3, ALL_TIERS),
        ("v2", 4, (Tier.DEVICE, Tier.HOST)),
    ):
        plan.value(Value(name=name, tensors={"t": TensorSpec(shape=(nbytes,), dtype="uint8")}, tiers=tiers))
    for name, writes, reads, workspace_bytes in (
        ("w0", ("v0",), (), 5),
        ("w1", ("v1",), (), 6),
        ("w2", ("v2",), (), 6),
        ("r0", (), ("v0", "v2"), 1),
        ("r1", (), ("v0", "v1"), 3),
        ("r2", (), ("v0",), 5),
    ):
        plan.add(Stage(name=name, kind="work", run=touch, writes=writes, reads=reads, workspace_bytes=workspace_bytes))
    for device_bytes in (12, 13):
        budget = Budget(device_bytes=device_bytes, host_bytes=5, disk_bytes=UNLIMITED_BYTES)
        assert exceeds(replay(plan, make_schedule(plan, budget, SECONDS)).peak, budget) == []
