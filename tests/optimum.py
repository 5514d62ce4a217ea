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

The scheduler has less: its orders are those of a small portfolio, and a copy is stored only as it leaves the device.
Neither one's homes are given up before their Values die, and neither moves Values between host and disk.

`Optimum.instructions` is the schedule itself, so that a test can have the simulator carry it out: what the oracle
claims is a time that the engine's own clock shows within the engine's own ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import networkx as nx
from ortools.sat.python import cp_model

from engine.budget import Budget, Tier
from engine.hardware import HardwareProfile
from engine.needs import touches
from engine.plan import Plan, Stage, Value
from engine.schedule import Copy, Create, Drop, Instruction, Run, Schedule, staging_need

TICKS = 20_000
# The time of a plan without any transfer hidden is about this many ticks: rounding to them is far below a percent.

PARTS = 100
# Of a tick: the overlap counts in hundredths.

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

    ``hint`` is a schedule whose order the search begins with.
    """
    model = _Model(plan, budget, profile, free_order=free_order)
    if hint is not None and free_order:
        model.start_from([stage.name for stage in hint.stages])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = num_threads
    solver.parameters.random_seed = 1
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return model.found(solver, proved=status == cp_model.OPTIMAL)


class _Model:
    """The variables: by position in the order, ``p``, and by stage ``i`` and Value ``v`` as in the plan's order."""

    def __init__(self, plan: Plan, budget: Budget, profile: HardwareProfile, *, free_order: bool) -> None:
        self.plan, self.budget, self.profile = plan, budget, profile
        self.stages = plan.ordered()
        self.num = len(self.stages)
        self.values: list[Value] = [plan.values[n] for n in dict.fromkeys(n for s in self.stages for n in s.uses())]
        self.model = cp_model.CpModel()
        self.ticks_per_s = TICKS / max(1e-9, self._all_s())
        self._order(free_order)
        self._uses()
        self._copies()
        self._device()
        self._homes()
        self._time()

    # What things take

    def _all_s(self) -> float:
        transfers = sum(sum(self._trips_s(value, Tier.HOST)) for value in self.values)
        return sum(self.profile.seconds(stage.cost) for stage in self.stages) + transfers

    def _trips_s(self, value: Value, tier: Tier) -> tuple[float, float]:
        pieces = sum(spec.num_pieces for spec in value.tensors.values())
        link = self.profile.transfer_s
        return (
            link(tier, Tier.DEVICE, value.nbytes, pieces),
            link(Tier.DEVICE, tier, value.nbytes, pieces),
        )

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
    def _tiers(self) -> dict[str, list[Tier]]:
        """The tiers that a Value's home can be on."""
        return {value.name: [t for t in (Tier.HOST, Tier.DISK) if t in value.tiers] for value in self.values}

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
        self.place: dict[str, Expression] = {}
        for index, stage in enumerate(self.stages):
            self.model.add(sum(self.at[index]) == 1)
            self.place[stage.name] = sum(p * x for p, x in enumerate(self.at[index]))
        for p in range(num):
            self.model.add(sum(row[p] for row in self.at) == 1)
        if free_order:
            for before, after in nx.transitive_reduction(graph).edges:
                self.model.add(self.place[before] + 1 <= self.place[after])

    def start_from(self, names: Sequence[str]) -> None:
        """Let the search begin with stages in the order of ``names``."""
        numbers = {name: p for p, name in enumerate(names)}
        for stage, row in zip(self.stages, self.at, strict=True):
            for p, x in enumerate(row):
                if not isinstance(x, int):
                    self.model.add_hint(x, int(numbers[stage.name] == p))

    def _bool(self, name: str) -> Literal:
        return self.model.new_bool_var(name)

    # Values: on the device, up to date at home

    def _uses(self) -> None:
        self.users = {
            value.name: [i for i, stage in enumerate(self.stages) if value.name in set(stage.uses())]
            for value in self.values
        }
        self.born: dict[str, list[Expression]] = {}
        self.left: dict[str, list[Literal]] = {}
        self.here: dict[str, list[Literal]] = {}
        for value in self.values:
            name, users = value.name, self.users[value.name]
            first = self.at[users[0]]
            self.born[name] = [sum(first[: p + 1]) for p in range(self.num)]
            self.left[name] = [1 if value.keep else self._still_used(name, p) for p in range(self.num)]
            on_device = Tier.DEVICE in value.tiers
            self.here[name] = [
                self._bool(f"here {name}@{p}") if on_device and self._may_live(name, p) else 0 for p in range(self.num)
            ]
            for p in range(self.num):
                for i in users:
                    if name in set(self.stages[i].resident()):
                        self.model.add(self.here[name][p] >= self.at[i][p])
                if value.pinned:
                    self.model.add(self.here[name][p] >= self.born[name][p] + self.left[name][p] - 1)

    def _still_used(self, name: str, p: int) -> Literal:
        """Return whether a Value is used at a position or later."""
        later: list[Literal] = [sum(self.at[i][p:]) for i in self.users[name]]
        if all(isinstance(each, int) for each in later):
            return max(later)
        left = self._bool(f"left {name}@{p}")
        for each in later:
            self.model.add(left >= each)
        return left

    def _may_live(self, name: str, p: int) -> bool:
        unborn = isinstance(self.born[name][p], int) and not self.born[name][p]
        dead = isinstance(self.left[name][p], int) and not self.left[name][p]
        return not (unborn or dead)

    def _copies(self) -> None:
        """A copy comes and goes; a home is up to date until the copy is changed, and has to be when that goes."""
        self.waited_fetch: dict[str, list[Literal]] = {}
        self.fetch: dict[str, list[Literal]] = {}
        self.waited_store: dict[str, list[Literal]] = {}
        self.store: dict[str, list[Literal]] = {}
        self.clean: dict[str, list[Literal]] = {}
        for value in self.values:
            name, can_leave = value.name, bool(self._tiers[value.name]) and Tier.DEVICE in value.tiers
            rows = [self.waited_fetch, self.fetch, self.waited_store, self.store]
            lives = [self._may_live(name, p) for p in range(self.num)]
            for kind, row in enumerate(rows):
                row[name] = [
                    self._bool(f"copy{kind} {name}@{p}") if can_leave and lives[p] else 0 for p in range(self.num)
                ]
            self.clean[name] = [self._bool(f"clean {name}@{p}") if lives[p] else 1 for p in range(self.num)]
            for p in range(self.num):
                if self._may_live(name, p):
                    self._copies_at(value, p)

    def _copies_at(self, value: Value, p: int) -> None:
        name, add = value.name, self.model.add
        here, clean = self.here[name], self.clean[name]
        users = self.users[name]
        busy = sum(self.at[i][p] for i in users)
        changed = sum(self.at[i][p] for i in users if name in set(self.stages[i].changes()))
        before, clean_before = (here[p - 1], clean[p - 1]) if p else (0, 0)
        born_before = self.born[name][p - 1] if p else 0
        come = self.waited_fetch[name][p] + self.fetch[name][p]
        add(come >= here[p] - before - (1 - born_before))
        add(self.fetch[name][p] <= 1 - busy)
        add(self.fetch[name][p] <= here[p])
        add(self.fetch[name][p] <= 1 - before)
        add(self.store[name][p] <= 1 - busy)
        add(self.store[name][p] <= here[p])
        add(self.waited_store[name][p] <= here[p])
        stored = self.waited_store[name][p] + self.store[name][p]
        add(clean[p] <= clean_before + stored + (1 - here[p]))
        add(clean[p] <= self.waited_store[name][p] + (1 - changed) + (1 - here[p]))
        if p:  # what goes has a home that is up to date, if it is needed again
            add(clean[p - 1] >= before - here[p] + self.left[name][p] - 1)

    # Bytes

    def _device(self) -> None:
        self.two = [self._bool(f"two buffers@{p}") for p in range(self.num)]
        self.away: dict[tuple[int, str, int], Literal] = {}  # a stage uses a Value that is not on the device
        for i, p in self._whereabouts():
            for name in {n for stream in self.stages[i].streams for n in stream.values}:
                away = self._bool(f"away {i} {name}@{p}")
                self.model.add(away >= self.at[i][p] - self.here[name][p])
                self.away[i, name, p] = away
        for p in range(self.num):
            held = sum(value.nbytes * self.here[value.name][p] for value in self.values)
            work = sum(stage.workspace_bytes * self.at[i][p] for i, stage in enumerate(self.stages))
            self.model.add(held + work + self._buffers(p) <= self.budget.device_bytes)

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
                one, other = (self._bool(f"buffer {i} {number} {which}@{p}") for which in range(2))
                for each in away:
                    self.model.add(one >= each)
                self.model.add(other >= one + self.two[p] - 1)
                total += nbytes * (one + other)
        return total

    def _homes(self) -> None:
        self.on_disk: dict[str, Literal] = {}
        self.at_home: dict[str, list[Literal]] = {}
        for value in self.values:
            tiers = self._tiers[value.name]
            self.on_disk[value.name] = self._bool(f"disk {value.name}") if len(tiers) > 1 else int(tiers == [Tier.DISK])
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
                self.model.add(each <= self.budget[tier])

    def _home_of(self, value: Value, load: dict[Tier, list[Expression]]) -> None:
        """A home is there from the first time that something is put into it until the Value dies."""
        name, add = value.name, self.model.add
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
        total: Expression = sum(self._ticks(self.profile.seconds(stage.cost)) for stage in self.stages)
        overlap = round(PARTS * self.profile.overlap)
        total *= PARTS
        most = 4 * TICKS
        for p in range(self.num):
            compute = sum(self._ticks(self.profile.seconds(s.cost)) * self.at[i][p] for i, s in enumerate(self.stages))
            waited, alongside = self._copy_ticks(p)
            streamed, most_streamed = self._stream_ticks(p)
            total += PARTS * waited
            hidden = alongside
            if most_streamed:
                alone = self.model.new_int_var(0, most_streamed, f"streamed alone@{p}")
                self.model.add(alone >= streamed - most_streamed * self.two[p])
                total += PARTS * alone
                hidden += streamed - alone
            longer = self.model.new_int_var(0, PARTS * most, f"longer@{p}")
            self.model.add(longer >= (PARTS - overlap) * hidden)
            self.model.add(longer >= PARTS * hidden - overlap * compute)
            total += longer
        self.model.minimize(total)

    def _copy_ticks(self, p: int) -> tuple[Expression, Expression]:
        waited: Expression = 0
        alongside: Expression = 0
        for value in self.values:
            for rows, direction in (((self.waited_fetch, self.fetch), 0), ((self.waited_store, self.store), 1)):
                if not isinstance(rows[0][value.name][p], int):
                    waited += self._by_tier(value, rows[0][value.name][p], direction)
                    alongside += self._by_tier(value, rows[1][value.name][p], direction)
        return waited, alongside

    def _by_tier(self, value: Value, happens: Literal, direction: int) -> Expression:
        ticks = {tier: self._ticks(self._trips_s(value, tier)[direction]) for tier in self._tiers[value.name]}
        return self._priced(value.name, happens, ticks)

    def _priced(self, name: str, happens: Literal, ticks: dict[Tier, int]) -> Expression:
        least = min(ticks.values())
        if len(ticks) == 1:
            return least * happens
        from_disk = self._bool(f"from disk {name} {happens}")
        self.model.add(from_disk >= happens + self.on_disk[name] - 1)
        return ticks[Tier.HOST] * happens + (ticks[Tier.DISK] - ticks[Tier.HOST]) * from_disk

    def _stream_ticks(self, p: int) -> tuple[Expression, int]:
        """Return the ticks of streams at a position, and the most that they can be."""
        total: Expression = 0
        most = 0
        for i, stage in enumerate(self.stages):
            if isinstance(self.at[i][p], int) and not self.at[i][p]:
                continue
            by_value: dict[str, dict[Tier, float]] = {}
            for tier in (Tier.HOST, Tier.DISK):
                for name, seconds in self._stream_s(stage, tier):
                    of_value = by_value.setdefault(name, {})
                    of_value[tier] = of_value.get(tier, 0.0) + seconds
            mine = 0
            for name, times in by_value.items():
                ticks = {tier: self._ticks(times[tier]) for tier in self._tiers[name]}
                total += self._priced(name, self.away[i, name, p], ticks)
                mine += max(ticks.values())
            most = max(most, mine)
        return total, most

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
        used = set(self.stages[i].uses())
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
