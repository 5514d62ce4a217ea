"""The fastest schedule of a small plan, by constraint programming: the oracle that the scheduler is held against.

The model has the time and the bytes of the engine's own: a stage takes its compute, transfers that are hidden behind
it as far as the hardware overlaps them, and transfers that it waits for; a tier never holds more than its budget. What
may be chosen is everything that a list of instructions can say:

- the order of stages, any that `engine.order.Dependencies` allows (or a given one, with ``free_order=False``),
- at every stage, whether a Value is on the device, whatever it is used for there, and whether its home is up to date,
- every fetch and store: when, waited for or alongside which stage, also long before a Value is needed or leaves, and
  stores of Values that stay where they are,
- one or two buffers for the streams of every stage by itself,
- the tier of every home, for the whole life of its Value.

Left out is only what can't be faster: to wait for a copy elsewhere than around a stage that uses the Value, to fetch
what leaves again unused, to stay on the device for no use.

The scheduler has less: its orders are those of a small portfolio. Neither one's homes are given up before their Values
die, and neither moves Values between host and disk.

`Optimum.instructions` is the schedule itself, so that a test can have the simulator carry it out: what the oracle
claims is a time that the engine's own clock shows within the engine's own ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np
from ortools.sat.python import cp_model

from engine.budget import Budget, Tier
from engine.clock import copy_s
from engine.hardware import HardwareProfile
from engine.needs import touches
from engine.plan import Plan, Stage, Value
from engine.schedule import Copy, Create, Drop, Instruction, Run, Schedule, staging_need

TICKS = 20_000
# The time of a plan without any transfer hidden is about this many ticks: rounding to them is far below a percent.

PARTS = 20
# Of a tick: the overlap counts in these.

GAP = 0.001
# An optimum counts as proved where the bound is within this of it: the last tenth of a percent takes the longest.

SLACK = 1.005
# Nothing slower than a known schedule by this factor is looked for. Rounding to ticks is far within it.

_TABLES = ("here", "newer", "fetch", "waited_fetch", "store", "waited_store")
# Of the model, by Value and position.

Literal = Any
Expression = Any
# A variable that is 0 or 1 or a number; sums of those. The library's stubs give every partial sum another type.


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """What was found: seconds of the schedule, no schedule is below ``bound_s``, and the schedule."""

    seconds: float
    bound_s: float
    proved: bool
    instructions: tuple[Instruction, ...]
    stages: tuple[Stage, ...]
    staging_bytes: int

    def schedule(self) -> Schedule:
        """Return it as the driver takes it; its peaks are the ledger's to find."""
        return Schedule(
            instructions=self.instructions,
            stages=self.stages,
            staging_bytes=self.staging_bytes,
            peak_bytes={},
            binding_stage="",
            seconds=self.seconds,
        )


def optimum(
    plan: Plan,
    budget: Budget,
    profile: HardwareProfile,
    *,
    free_order: bool = True,
    time_limit_s: float = 20.0,
    num_threads: int = 2,
    hint: Schedule | None = None,
) -> Optimum | None:
    """Return the fastest schedule of ``plan`` within ``budget``; None where none was found in the time given.

    ``hint`` is a schedule that the search begins with; nothing slower is looked for. ``proved`` means that no schedule
    is faster by more than `GAP`.
    """
    model = _Model(plan, budget, profile, free_order=free_order)
    if hint is not None:
        model.start_from(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_threads
    solver.parameters.random_seed = 1
    solver.parameters.linearization_level = 2
    solver.parameters.relative_gap_limit = GAP
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return model.found(solver, proved=status == cp_model.OPTIMAL)


class _Model:
    """The variables: by position in the order, ``p``, and by stage ``i`` and Value ``v`` as in the plan's order.

    What is constant is a number in place of a variable, so that a given order leaves few of them.
    """

    def __init__(self, plan: Plan, budget: Budget, profile: HardwareProfile, *, free_order: bool) -> None:
        self.plan, self.budget, self.profile = plan, budget, profile
        self.stages = plan.ordered()
        self.num = len(self.stages)
        self.values: list[Value] = [plan.values[n] for n in dict.fromkeys(n for s in self.stages for n in s.used)]
        self.model = cp_model.CpModel()
        self.ticks_per_s = TICKS / max(1e-9, self._all_s())
        self._order(free_order)
        self._uses()
        self._copies()
        self._device()
        self._homes()
        self._time()

    def _bool(self, name: str) -> Literal:
        return self.model.new_bool_var(name)

    def _add(self, constraint: Any) -> None:
        """Add a constraint, unless it is one of numbers alone."""
        if not isinstance(constraint, bool | np.bool_):
            self.model.add(constraint)
        elif not constraint:
            self.model.add_bool_or([])  # nothing is possible

    # What things take

    def _all_s(self) -> float:
        transfers = sum(sum(self._trips_s(value, Tier.HOST)) for value in self.values)
        return sum(self.profile.seconds(stage.cost) for stage in self.stages) + transfers

    def _trips_s(self, value: Value, tier: Tier) -> tuple[float, float]:
        profile = self.profile
        return copy_s(profile, value, tier, Tier.DEVICE), copy_s(profile, value, Tier.DEVICE, tier)

    def _ticks(self, seconds: float) -> int:
        return round(seconds * self.ticks_per_s)

    def _stream_s(self, stage: Stage, tier: Tier) -> Iterator[tuple[str, float]]:
        link = self.profile.transfer_s
        for stream in stage.streams:
            for touch in touches(self.plan, stream):
                seconds = link(tier, Tier.DEVICE, touch.in_bytes, touch.num_pieces) if touch.in_bytes else 0.0
                seconds += link(Tier.DEVICE, tier, touch.out_bytes, touch.num_pieces) if touch.out_bytes else 0.0
                yield touch.value, seconds

    @cached_property
    def _roomy(self) -> bool:
        """Whether the host has room for everything, so that no home need be on the disk."""
        return self.budget.host_bytes >= sum(value.nbytes for value in self.values) + staging_need(self.plan)

    @cached_property
    def _tiers(self) -> dict[str, list[Tier]]:
        """The tiers that a Value's home can be on; not the disk where the host, which is faster, has room for all."""
        order = [Tier.HOST, Tier.DISK]
        found = {value.name: [tier for tier in order if tier in value.tiers] for value in self.values}
        return {name: tiers[:1] if self._roomy else tiers for name, tiers in found.items()}

    # Order

    def _order(self, free_order: bool) -> None:
        graph, num = self.plan.graph(), self.num
        closure: nx.DiGraph[str] = nx.transitive_closure_dag(graph)
        self.at: list[list[Literal]] = []
        for index, stage in enumerate(self.stages):
            first, last = index, index
            if free_order:
                first, last = closure.in_degree(stage.name), num - 1 - closure.out_degree(stage.name)
            here = [self._bool(f"x{index}@{p}") if first < last and first <= p <= last else 0 for p in range(num)]
            if first == last:
                here[first] = 1
            self.at.append(here)
        for line in [*self.at, *zip(*self.at, strict=True)]:
            self._add(sum(line) == 1)
        row = {stage.name: self.at[index] for index, stage in enumerate(self.stages)}
        for before, after in nx.transitive_reduction(graph).edges:
            for p in range(num):  # what was there by p came behind what was there before p
                self._add(sum(row[before][:p]) >= sum(row[after][: p + 1]))
        self.behind: dict[str, set[str]] = {stage.name: set(closure.successors(stage.name)) for stage in self.stages}

    # Values: on the device, newer there than at home

    def _uses(self) -> None:
        self.users: dict[str, list[int]] = {value.name: [] for value in self.values}
        self.residents: dict[str, list[int]] = {value.name: [] for value in self.values}
        self.changers: dict[str, list[int]] = {value.name: [] for value in self.values}
        for i, stage in enumerate(self.stages):
            for table, names in (
                (self.users, stage.used), (self.residents, stage.resident()), (self.changers, stage.changed)
            ):  # fmt: skip
                for name in dict.fromkeys(names):
                    table[name].append(i)
        self.born: dict[str, list[Expression]] = {}
        self.left: dict[str, list[Literal]] = {}
        self.here: dict[str, list[Literal]] = {}
        for value in self.values:
            name = value.name
            first = self.at[self.users[name][0]]
            self.born[name] = [sum(first[: p + 1]) for p in range(self.num)]
            self.left[name] = [1 if value.keep else self._still_used(name, p) for p in range(self.num)]
            self.here[name] = [self._on_device(value, p) for p in range(self.num)]

    def _still_used(self, name: str, p: int) -> Literal:
        """Return whether a Value is used at a position or later."""
        users = self.users[name]
        last = [i for i in users if not any(self.stages[j].name in self.behind[self.stages[i].name] for j in users)]
        later: list[Literal] = [sum(self.at[i][p:]) for i in last]
        if all(isinstance(each, int) for each in later):
            return max(later)
        if len(later) == 1:
            return later[0]
        left = self._bool(f"left {name}@{p}")
        for each in later:
            self._add(left >= each)
        return left

    def _on_device(self, value: Value, p: int) -> Literal:
        """Return whether a Value is on the device at a position: it is where a stage has it as a resident."""
        resident = self._now(self.residents[value.name], p)
        if Tier.DEVICE not in value.tiers or not self._may_live(value.name, p):
            return 0
        if isinstance(resident, int) and resident:
            return 1
        here = self._bool(f"here {value.name}@{p}")
        self._add(here >= resident)
        if value.pinned:
            self._add(here >= self.born[value.name][p] + self.left[value.name][p] - 1)
        return here

    def _now(self, stages: Sequence[int], p: int) -> Expression:
        return sum(self.at[i][p] for i in stages)

    def _may_live(self, name: str, p: int) -> bool:
        unborn = isinstance(self.born[name][p], int) and not self.born[name][p]
        dead = isinstance(self.left[name][p], int) and not self.left[name][p]
        return not (unborn or dead)

    def _copies(self) -> None:
        """A copy on the device comes and goes; while it is *newer* than its home, it may not go without a store.

        A copy is waited for only around a stage that uses the Value, and runs alongside only the others: whatever
        waits elsewhere may as well run alongside or later.
        """
        tables: list[dict[str, list[Literal]]] = [{} for _ in range(5)]
        self.waited_fetch, self.fetch, self.waited_store, self.store, self.newer = tables
        for value in self.values:
            name, can_leave = value.name, bool(self._tiers[value.name]) and Tier.DEVICE in value.tiers
            for table in tables:
                table[name] = [0] * self.num
            for p in range(self.num):
                if can_leave and self._may_live(name, p):
                    self._copies_at(name, p)

    def _copies_at(self, name: str, p: int) -> None:
        here, left, busy = self.here[name][p], self.left[name][p], self._now(self.users[name], p)
        self._copy_variables(name, p, busy)
        fetch, store, waited = self.fetch[name][p], self.store[name][p], self.waited_store[name][p]
        newer = self.newer[name][p] = self._bool(f"newer {name}@{p}")
        before, newer_before = (self.here[name][p - 1], self.newer[name][p - 1]) if p else (0, 0)
        born_before, busy_before = (self.born[name][p - 1], self._now(self.users[name], p - 1)) if p else (0, 0)
        store_before = self.store[name][p - 1] if p else 0
        self._add(self.waited_fetch[name][p] + fetch >= here - before - (1 - born_before))
        self._add(fetch + before <= 1)
        for copied in (fetch, store, waited, newer):
            self._add(copied <= here)
        resident_change = self._now([i for i in self.changers[name] if i in self.residents[name]], p)
        change = self._now(self.changers[name], p)
        self._add(newer >= resident_change - waited)
        self._add(newer >= change + here - 1 - waited)
        self._add(newer >= newer_before - store - waited - (1 - left))
        self._add(newer_before <= here + (1 - left))
        if p + 1 < self.num and self._may_live(name, p + 1):  # what is fetched alongside is for the stage behind
            self._add(self.here[name][p + 1] >= fetch)
        self._add(before - here <= busy_before + store_before + (1 - left))  # what is of no use goes at once

    def _copy_variables(self, name: str, p: int, busy: Expression) -> None:
        idle = not isinstance(busy, int)
        if idle or busy:
            for kind, table in (("waited fetch", self.waited_fetch), ("waited store", self.waited_store)):
                table[name][p] = self._bool(f"{kind} {name}@{p}")
                self._add(table[name][p] <= busy)
        if idle or not busy:
            for kind, table in (("fetch", self.fetch), ("store", self.store)):
                table[name][p] = self._bool(f"{kind} {name}@{p}")
                self._add(table[name][p] <= 1 - busy)

    # Bytes

    def _device(self) -> None:
        self.two: list[Literal] = [0] * self.num
        self.away: dict[tuple[int, str, int], Expression] = {}  # a stage streams a Value that is not on the device
        for i, p in self._whereabouts():
            names = {name for stream in self.stages[i].streams for name in stream.values}
            if names and isinstance(self.two[p], int) and self.profile.overlap:
                self.two[p] = self._bool(f"two buffers@{p}")
            for name in names:
                self.away[i, name, p] = self._both(f"away {i} {name}@{p}", self.at[i][p], 1 - self.here[name][p])
        for p in range(self.num):
            held = sum(value.nbytes * self.here[value.name][p] for value in self.values)
            work = sum(stage.workspace_bytes * self.at[i][p] for i, stage in enumerate(self.stages))
            self._add(held + work + self._buffers(p) <= self.budget.device_bytes)

    def _both(self, name: str, first: Expression, second: Expression) -> Expression:
        """Return what is at least whether both are true."""
        for one, other in ((first, second), (second, first)):
            if isinstance(one, int):
                return one * other
        both = self._bool(name)
        self._add(both >= first + second - 1)
        return both

    def _whereabouts(self) -> Iterator[tuple[int, int]]:
        for i, row in enumerate(self.at):
            yield from ((i, p) for p, x in enumerate(row) if not isinstance(x, int) or x)

    def _buffers(self, p: int) -> Expression:
        total: Expression = 0
        for i, stage in enumerate(self.stages):
            for number, stream in enumerate(stage.streams):
                nbytes = self.plan.buffer_bytes(stream)
                away = [self.away[i, name, p] for name in stream.values if (i, name, p) in self.away]
                if not nbytes or not away:
                    continue
                one = self._bool(f"buffer {i} {number}@{p}")
                for each in away:
                    self._add(one >= each)
                total += nbytes * (one + self._both(f"second buffer {i} {number}@{p}", one, self.two[p]))
        return total

    def _homes(self) -> None:
        self.on_disk: dict[str, Literal] = {}
        for value in self.values:
            tiers = self._tiers[value.name]
            self.on_disk[value.name] = self._bool(f"disk {value.name}") if len(tiers) > 1 else int(tiers == [Tier.DISK])
        self.any_disk: Literal = 0
        if self._roomy and not any(self.on_disk.values()):
            return
        staging_bytes = staging_need(self.plan)
        self.any_disk = self._bool("any disk")
        load: dict[Tier, list[Expression]] = {
            Tier.HOST: [staging_bytes * self.any_disk for _ in range(self.num + 1)],
            Tier.DISK: [0] * (self.num + 1),
        }
        for value in (value for value in self.values if self._tiers[value.name]):
            self._home_of(value, load)
        for tier, bytes_at in load.items():
            for each in bytes_at:
                self._add(each <= self.budget[tier])

    def _home_of(self, value: Value, load: dict[Tier, list[Expression]]) -> None:
        """A home is there from the first time that something is put into it until the Value dies."""
        name, add = value.name, self._add
        home = [self._bool(f"home {name}@{p}") for p in range(self.num + 1)]
        disk = [self._bool(f"home on disk {name}@{p}") for p in range(self.num + 1)]
        for p in range(self.num + 1):
            left = self.left[name][p] if p < self.num else int(value.keep)
            if p < self.num:
                add(home[p] >= self.born[name][p] + left - 1 - self.here[name][p])
                add(home[p] >= self.store[name][p] + left - 1)
            if p:
                add(home[p] >= home[p - 1] + left - 1)
                add(home[p] >= self.waited_store[name][p - 1] + left - 1)
            add(disk[p] >= home[p] + self.on_disk[name] - 1)
            add(self.any_disk >= disk[p])
            host = self._bool(f"home on host {name}@{p}")
            add(host >= home[p] - self.on_disk[name])
            load[Tier.HOST][p] += value.nbytes * host
            load[Tier.DISK][p] += value.nbytes * disk[p]

    # Time

    def _time(self) -> None:
        """A stage of compute c and hidden transfers h takes c + max((1 - overlap) h, h - overlap c)."""
        self.total: Expression = PARTS * sum(self._ticks(self.profile.seconds(stage.cost)) for stage in self.stages)
        overlap = round(PARTS * self.profile.overlap)
        for p in range(self.num):
            compute = sum(self._ticks(self.profile.seconds(s.cost)) * self.at[i][p] for i, s in enumerate(self.stages))
            waited, hidden, most = self._copy_ticks(p)
            for i in (i for i in range(self.num) if self._may_be_at(i, p)):
                for name, ticks in self._stream_ticks[i].items():
                    alone, beside = self._streamed(i, name, p, ticks)
                    waited, hidden, most = waited + alone, hidden + beside, most + max(ticks.values())
            self.total += PARTS * waited
            if most:
                longer = self.model.new_int_var(0, PARTS * most, f"longer@{p}")
                self._add(longer >= (PARTS - overlap) * hidden)
                self._add(longer >= PARTS * hidden - overlap * compute)
                self.total += longer
        self.model.minimize(self.total)

    def _may_be_at(self, i: int, p: int) -> bool:
        return not isinstance(self.at[i][p], int) or bool(self.at[i][p])

    def _copy_ticks(self, p: int) -> tuple[Expression, Expression, int]:
        waited: Expression = 0
        hidden: Expression = 0
        most = 0
        for value in (value for value in self.values if self._tiers[value.name]):
            name, trips = value.name, {tier: self._trips_s(value, tier) for tier in self._tiers[value.name]}
            fetch, store = ({t: self._ticks(trip[way]) for t, trip in trips.items()} for way in range(2))
            waited += self._priced(name, self.waited_fetch[name][p], fetch)
            waited += self._priced(name, self.waited_store[name][p], store)
            hidden += self._priced(name, self.fetch[name][p], fetch) + self._priced(name, self.store[name][p], store)
            if not isinstance(self.fetch[name][p], int):
                most += max(fetch.values()) + max(store.values())
        return waited, hidden, most

    def _priced(self, name: str, happens: Expression, ticks: dict[Tier, int]) -> Expression:
        """Return what a transfer from or to a Value's home takes, if it happens."""
        if len(ticks) == 1:
            return happens * next(iter(ticks.values()))
        from_disk = self._both(f"from disk {name} {happens}", happens, self.on_disk[name])
        return ticks[Tier.HOST] * happens + (ticks[Tier.DISK] - ticks[Tier.HOST]) * from_disk

    @cached_property
    def _stream_ticks(self) -> list[dict[str, dict[Tier, int]]]:
        """Of every stage: what its streams take for each Value, by the tier that this lives on."""
        found = []
        for stage in self.stages:
            seconds: dict[str, dict[Tier, float]] = {}
            for tier in (Tier.HOST, Tier.DISK):
                for name, each in self._stream_s(stage, tier):
                    if tier in self._tiers[name]:
                        of_value = seconds.setdefault(name, {})
                        of_value[tier] = of_value.get(tier, 0.0) + each
            found.append({n: {tier: self._ticks(s) for tier, s in by_tier.items()} for n, by_tier in seconds.items()})
        return found

    def _streamed(self, i: int, name: str, p: int, ticks: dict[Tier, int]) -> tuple[Expression, Expression]:
        """Return the ticks of a Value in a stage's streams that the stage waits for, and those that may be hidden.

        They are waited for unless streams have two buffers.
        """
        away = self.away[i, name, p]
        alone = away if isinstance(self.two[p], int) else self._both(f"alone {i} {name}@{p}", away, 1 - self.two[p])
        if not isinstance(alone, int) and alone is not away:
            self._add(alone <= away)
        waited = self._priced(name, alone, ticks)
        return waited, self._priced(name, away, ticks) - waited

    # A schedule that is known

    def start_from(self, schedule: Schedule) -> None:
        """Let the search begin with a schedule, and look for nothing slower."""
        self.model.add(self.total <= math.ceil(SLACK * schedule.seconds * self.ticks_per_s * PARTS))
        places = {stage.name: p for p, stage in enumerate(schedule.stages)}
        for stage, row in zip(self.stages, self.at, strict=True):
            for p, x in enumerate(row):
                self._hint(x, places[stage.name] == p)
        seen: dict[str, dict[str, set[int]]] = {kind: {v.name: set() for v in self.values} for kind in _TABLES}
        self._look_at(schedule, seen)
        for kind, by_name in seen.items():
            for name, found in by_name.items():
                for p, x in enumerate(getattr(self, kind)[name]):
                    self._hint(x, p in found)

    def _hint(self, variable: Expression, holds: bool) -> None:
        if isinstance(variable, cp_model.IntVar):
            self.model.add_hint(variable, int(holds))

    def _look_at(self, schedule: Schedule, seen: dict[str, dict[str, set[int]]]) -> None:
        """Note at which positions what the tables have is true in a schedule."""
        here: set[str] = set()
        changed: set[str] = set()
        p = 0
        for item in schedule.instructions:
            match item:
                case Create(value=name, tier=Tier.DEVICE) | Copy(value=name, target=Tier.DEVICE):
                    here.add(name)
                    if isinstance(item, Copy):
                        seen["fetch" if item.alongside else "waited_fetch"][name].add(p)
                case Copy(value=name):
                    seen["store" if item.alongside else "waited_store"][name].add(p if item.alongside else p - 1)
                    changed.discard(name)
                    if not item.alongside:
                        seen["newer"][name].discard(p - 1)
                case Drop(value=name, tier=Tier.DEVICE):
                    here.discard(name)
                    changed.discard(name)
                case Run():
                    changed.update(here.intersection(schedule.stages[p].changed))
                    for name in here:
                        seen["here"][name].add(p)
                    for name in changed:
                        seen["newer"][name].add(p)
                    self._hint(self.two[p], item.slots == 2)
                    p += 1

    # The schedule

    def found(self, solver: cp_model.CpSolver, *, proved: bool) -> Optimum:
        per_s = PARTS * self.ticks_per_s
        order = [next(i for i, row in enumerate(self.at) if solver.value(row[p])) for p in range(self.num)]
        return Optimum(
            seconds=solver.objective_value / per_s,
            bound_s=solver.best_objective_bound / per_s,
            proved=proved,
            instructions=tuple(self._instructions(solver, order)),
            stages=tuple(self.stages[i] for i in order),
            staging_bytes=staging_need(self.plan) if solver.value(self.any_disk) else 0,
        )

    def _instructions(self, solver: cp_model.CpSolver, order: Sequence[int]) -> Iterator[Instruction]:
        where: dict[str, set[Tier]] = {value.name: set() for value in self.values}
        last = {v.name: max(p for p, i in enumerate(order) if i in self.users[v.name]) for v in self.values}
        home = {v.name: Tier.DISK if solver.value(self.on_disk[v.name]) else Tier.HOST for v in self.values}
        for p, i in enumerate(order):
            come, alongside = self._arrivals(solver, p, i, where, home, last)
            yield from come
            yield from alongside
            yield self._run(solver, p, i, where)
            for value in self.values:
                name = value.name
                if not where[name]:
                    continue
                if last[name] == p and not value.keep:
                    yield from (Drop(value=name, tier=tier) for tier in sorted(where[name]))
                    where[name] = set()
            for value in self.values:
                name = value.name
                if where[name] and solver.value(self.waited_store[name][p]):
                    yield Copy(value=name, source=Tier.DEVICE, target=home[name])
                    where[name].add(home[name])

    def _arrivals(
        self,
        solver: cp_model.CpSolver,
        p: int,
        i: int,
        where: dict[str, set[Tier]],
        home: dict[str, Tier],
        last: dict[str, int],
    ) -> tuple[list[Instruction], list[Instruction]]:
        come: list[Instruction] = []
        alongside: list[Instruction] = []
        used = set(self.stages[i].used)
        for name in where:
            if where[name] and Tier.DEVICE in where[name] and not solver.value(self.here[name][p]):
                come.append(Drop(value=name, tier=Tier.DEVICE))
                where[name].discard(Tier.DEVICE)
        for name in where:
            here = bool(solver.value(self.here[name][p]))
            if not where[name]:
                if name in used and p == min(q for q in range(p + 1) if self._is_first(solver, name, q)):
                    tier = Tier.DEVICE if here else home[name]
                    come.append(Create(value=name, tier=tier))
                    where[name].add(tier)
                continue
            if here and Tier.DEVICE not in where[name]:
                hidden = bool(solver.value(self.fetch[name][p]))
                (alongside if hidden else come).append(
                    Copy(value=name, source=home[name], target=Tier.DEVICE, alongside=hidden)
                )
                where[name].add(Tier.DEVICE)
            if solver.value(self.store[name][p]):
                alongside.append(Copy(value=name, source=Tier.DEVICE, target=home[name], alongside=True))
                where[name].add(home[name])
        return come, alongside

    def _is_first(self, solver: cp_model.CpSolver, name: str, p: int) -> bool:
        return bool(solver.value(self.at[self.users[name][0]][p]))

    def _run(self, solver: cp_model.CpSolver, p: int, i: int, where: dict[str, set[Tier]]) -> Run:
        stage = self.stages[i]
        away = [s for s in stage.streams if any(Tier.DEVICE not in where[name] for name in s.values)]
        slots = 1 + solver.value(self.two[p])
        return Run(
            stage=stage.name,
            workspace_bytes=stage.workspace_bytes,
            buffer_bytes=slots * sum(self.plan.buffer_bytes(stream) for stream in away),
            slots=slots,
        )
