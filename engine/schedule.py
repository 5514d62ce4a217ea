"""When everything happens and where everything lives, decided ahead of time.

`make_schedule` walks the stages in the plan's one order and emits instructions. Before a stage runs, what it reads,
writes and updates is on the device; whatever else is there leaves, farthest next use first, until the stage's
workspace and stream buffers fit. Leaving Values go to the host while it has room, then to disk. A streamed Value that
is born takes the device if it fits without pushing anything out. Values are dropped at once after their last use.

What is guaranteed: no tier's budget is ever exceeded (the same `Ledger` is asked for every byte), and a plan whose
`device_floor` is within the device budget always gets a schedule if host and disk have room. What is not: that the
schedule is the fastest one.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.ledger import Ledger
from engine.plan import Plan, Stage, Value
from engine.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Create:
    """Bring a Value to life on a tier."""

    value: str
    tier: Tier


@dataclass(frozen=True, kw_only=True)
class Move:
    """Copy a Value from one tier to another and free it at the source (a spill or a fetch)."""

    value: str
    source: Tier
    target: Tier


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run a stage; ``buffer_bytes`` are those of its streams, ``workspace_bytes`` its own.

    Each of its streams passes through ``slots`` buffers of one piece: with two, the next piece comes while one is used.
    """

    stage: str
    workspace_bytes: int
    buffer_bytes: int
    slots: int = 1


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Free a Value."""

    value: str
    tier: Tier


Instruction = Create | Move | Run | Drop

STAGING_ENTRY = "disk staging buffer"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """An ordered list of instructions for one worker, and what it takes.

    ``staging_bytes`` of host memory are held throughout where the disk is used; ``binding_stage`` is the stage during
    which the device peak is reached.
    """

    instructions: tuple[Instruction, ...]
    stages: tuple[Stage, ...]
    staging_bytes: int
    peak_bytes: dict[Tier, int]
    binding_stage: str


def begin(ledger: Ledger, plan: Plan, instruction: Instruction) -> None:
    """Count what an instruction adds. Raises DoesNotFitError if that is too much."""
    match instruction:
        case Create(value=name, tier=tier):
            ledger.add(tier, name, plan.values[name].nbytes)
        case Move(value=name, target=target):
            ledger.add(target, name, plan.values[name].nbytes)
        case Run(stage=name):
            ledger.add(Tier.DEVICE, f"workspace of {name}", instruction.workspace_bytes + instruction.buffer_bytes)
        case Drop():
            pass


def end(ledger: Ledger, instruction: Instruction) -> None:
    """Uncount what an instruction leaves behind."""
    match instruction:
        case Move(value=name, source=source):
            ledger.remove(source, name)
        case Run(stage=name):
            ledger.remove(Tier.DEVICE, f"workspace of {name}")
        case Drop(value=name, tier=tier):
            ledger.remove(tier, name)
        case Create():
            pass


def lifetimes(stages: list[Stage]) -> dict[str, list[int]]:
    """Return, per Value, the indices of the stages that use it, ascending."""
    uses: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in dict.fromkeys(stage.uses()):
            uses.setdefault(name, []).append(index)
    return uses


def device_floor(plan: Plan) -> tuple[int, Stage]:
    """Return the fewest device bytes that any schedule of ``plan`` needs, and the stage that needs them.

    Proof: while a stage runs, its resident Values, its workspace, and every live Value that may live on the device
    only are on the device whatever the schedule does. A stream of Values that may leave needs its buffer, which is
    its largest piece, or has the Value with that piece there instead, which is no smaller; no Value is in two
    buffered streams of a stage, or resident and in one. `make_schedule` reaches the bound where host and disk have
    room, since everything else can leave.
    """
    stages = plan.ordered()
    uses = lifetimes(stages)
    best, binding, pinned = 0, stages[0], 0
    for index, stage in enumerate(stages):
        names = dict.fromkeys(stage.uses())
        pinned += sum(plan.values[n].nbytes for n in names if plan.values[n].pinned and uses[n][0] == index)
        resident = sum(plan.values[n].nbytes for n in dict.fromkeys(stage.resident()) if _takes_device(plan.values[n]))
        streams = sum(plan.buffer_bytes(stream) for stream in stage.streams)
        need = pinned + resident + streams + stage.workspace_bytes
        if need > best:
            best, binding = need, stage
        pinned -= sum(
            plan.values[n].nbytes
            for n in names
            if plan.values[n].pinned and uses[n][-1] == index and not plan.values[n].keep
        )
    return best, binding


def _takes_device(value: Value) -> bool:
    return Tier.DEVICE in value.tiers and not value.pinned


def staging_need(plan: Plan) -> int:
    """Return the host bytes through which Values pass between device and disk: the largest piece of any of them."""
    pieces = [
        spec.piece_bytes
        for value in plan.values.values()
        if Tier.DISK in value.tiers and not value.provided
        for spec in value.tensors.values()
    ]
    return max(pieces, default=0)


def make_schedule(plan: Plan, budget: Budget) -> Schedule:
    """Return a schedule of ``plan`` within ``budget``.

    Raises:
        DoesNotFitError: there is none, or host and disk are too small for what has to leave the device.
        PlanError: the plan is not well formed.
    """
    stages = plan.ordered()
    try:
        return _with_staging(plan, stages, budget, disk_first=False)
    except DoesNotFitError as error:
        try:  # the host may have been filled with what could have gone to disk
            return _with_staging(plan, stages, budget, disk_first=True)
        except DoesNotFitError:
            raise error from None


def _with_staging(plan: Plan, stages: list[Stage], budget: Budget, *, disk_first: bool) -> Schedule:
    """Schedule without the host buffer that disk transfers need, and once more with it if the disk is used."""
    schedule = _Scheduler(plan, stages, budget, staging_bytes=0, disk_first=disk_first).run()
    if any(Tier.DISK in _tiers_of(plan, item) for item in schedule.instructions):
        staging_bytes = staging_need(plan)
        schedule = _Scheduler(plan, stages, budget, staging_bytes=staging_bytes, disk_first=disk_first).run()
    return schedule


def _tiers_of(plan: Plan, instruction: Instruction) -> tuple[Tier, ...]:
    match instruction:
        case Create(value=name, tier=tier) if not plan.values[name].provided:
            return (tier,)
        case Move(target=target):
            return (target,)
    return ()


class _Scheduler:
    def __init__(
        self, plan: Plan, stages: list[Stage], budget: Budget, *, staging_bytes: int, disk_first: bool
    ) -> None:
        self.plan, self.stages = plan, stages
        self.lower_tiers = (Tier.DISK, Tier.HOST) if disk_first else (Tier.HOST, Tier.DISK)
        self.ledger = Ledger(budget)
        self.uses = lifetimes(stages)
        self.cursor = dict.fromkeys(self.uses, 0)
        self.where: dict[str, Tier] = {}
        self.on_device: dict[str, None] = {}  # movable Values there, oldest first
        self.instructions: list[Instruction] = []
        self.staging_bytes = staging_bytes
        self.binding, self.binding_bytes = stages[0].name if stages else "", -1

    def run(self) -> Schedule:
        if self.staging_bytes > self.ledger.free(Tier.HOST):
            raise DoesNotFitError(
                f"the disk is needed, and with it a host buffer of {format_bytes(self.staging_bytes)} (the largest "
                f"piece of any Value that may go there), but the host budget is "
                f"{format_bytes(self.ledger.budget.host_bytes)}; give at least --budget host={self.staging_bytes}, or "
                "more device"
            )
        if self.staging_bytes:
            self.ledger.add(Tier.HOST, STAGING_ENTRY, self.staging_bytes)
        for index, stage in enumerate(self.stages):
            try:
                self._prepare(stage)
                self._run(stage)
            except DoesNotFitError as error:
                error.report["binding_stage"] = stage.name
                raise
            self._finish(index, stage)
        return Schedule(
            instructions=tuple(self.instructions),
            stages=tuple(self.stages),
            staging_bytes=self.staging_bytes,
            peak_bytes=dict(self.ledger.peak),
            binding_stage=self.binding,
        )

    def _emit(self, instruction: Instruction) -> None:
        begin(self.ledger, self.plan, instruction)
        if isinstance(instruction, Run) and self.ledger.live[Tier.DEVICE] > self.binding_bytes:
            self.binding, self.binding_bytes = instruction.stage, self.ledger.live[Tier.DEVICE]
        end(self.ledger, instruction)
        self.instructions.append(instruction)

    def _prepare(self, stage: Stage) -> None:
        """Make room for a stage, then bring to the device what it needs there."""
        resident = dict.fromkeys(stage.resident())
        streamed = dict.fromkeys(name for stream in stage.streams for name in stream.values)
        born = [name for name in streamed if name not in self.where and not self.plan.values[name].pinned]
        incoming = [name for name in resident if self._belongs_on_device(name) and not self._is_on_device(name)]
        incoming += [name for name in streamed if name not in self.where and self.plan.values[name].pinned]
        need = stage.workspace_bytes + self._bytes(incoming)
        buffers = sum(self.plan.buffer_bytes(stream) for stream in stage.streams)
        all_stay = all(self._is_on_device(name) or self._may_be_born_there(name) for name in streamed)
        if not (all_stay and need + self._bytes(born) <= self.ledger.free(Tier.DEVICE)):
            need += buffers
            self._evict(stage, resident, need)
        room = self.ledger.free(Tier.DEVICE) - need
        for name in (name for name in resident if name not in self.where and name not in incoming):
            self._create(name, self.plan.values[name].tiers[0])
        for name in born:
            room -= self._place(name, room)
        for name in incoming:
            self._bring(name, stage)

    def _is_on_device(self, name: str) -> bool:
        return self.where.get(name) is Tier.DEVICE

    def _may_be_born_there(self, name: str) -> bool:
        return name not in self.where and self._belongs_on_device(name)

    def _place(self, name: str, room: int) -> int:
        """Create a streamed Value where there is room; return the device bytes that it took."""
        value = self.plan.values[name]
        if Tier.DEVICE in value.tiers and value.nbytes <= room:
            self._create(name, Tier.DEVICE)
            return value.nbytes
        self._create(name, self._lower_tier(value))
        return 0

    def _bring(self, name: str, stage: Stage) -> None:
        if self.plan.values[name].nbytes > self.ledger.free(Tier.DEVICE):
            raise DoesNotFitError(
                f"stage {stage.name} needs {name} ({format_bytes(self.plan.values[name].nbytes)}) on the device, where "
                f"{format_bytes(self.ledger.free(Tier.DEVICE))} of {format_bytes(self.ledger.budget.device_bytes)} "
                "are free"
            )
        if name in self.where:
            self._move(name, Tier.DEVICE)
        else:
            self._create(name, Tier.DEVICE)

    def _run(self, stage: Stage) -> None:
        off_device = [s for s in stage.streams if any(not self._is_on_device(name) for name in s.values)]
        buffer_bytes = sum(self.plan.buffer_bytes(stream) for stream in off_device)
        self._emit(Run(stage=stage.name, workspace_bytes=stage.workspace_bytes, buffer_bytes=buffer_bytes))

    def _finish(self, index: int, stage: Stage) -> None:
        for name in dict.fromkeys(stage.uses()):
            self.cursor[name] += 1
            if self.uses[name][-1] == index and not self.plan.values[name].keep:
                self._emit(Drop(value=name, tier=self.where.pop(name)))
                self.on_device.pop(name, None)

    def _evict(self, stage: Stage, keep: dict[str, None], need: int) -> None:
        """Spill movable Values, farthest next use first, until ``need`` device bytes are free."""
        if need <= self.ledger.free(Tier.DEVICE):
            return
        candidates = sorted((name for name in self.on_device if name not in keep), key=self._next_use, reverse=True)
        for name in candidates:
            self._move(name, self._lower_tier(self.plan.values[name]))
            if need <= self.ledger.free(Tier.DEVICE):
                return
        raise DoesNotFitError(
            f"stage {stage.name} needs {format_bytes(need)} more on the device than what has to stay there "
            f"({format_bytes(self.ledger.live[Tier.DEVICE])}); the budget is "
            f"{format_bytes(self.ledger.budget.device_bytes)}"
        )

    def _next_use(self, name: str) -> int:
        uses, cursor = self.uses[name], self.cursor[name]
        return uses[cursor] if cursor < len(uses) else len(self.stages)

    def _lower_tier(self, value: Value) -> Tier:
        for tier in self.lower_tiers:
            if tier in value.tiers and value.nbytes <= self.ledger.free(tier):
                return tier
        tried = ", ".join(
            f"{tier} has {format_bytes(self.ledger.free(tier))} of {format_bytes(self.ledger.budget[tier])} free"
            for tier in (Tier.HOST, Tier.DISK)
        )
        raise DoesNotFitError(
            f"{value.name} ({format_bytes(value.nbytes)}) has to leave the device and fits nowhere: {tried}; "
            "give a larger host or disk budget"
        )

    def _create(self, name: str, tier: Tier) -> None:
        self._emit(Create(value=name, tier=tier))
        self._settle(name, tier)

    def _move(self, name: str, target: Tier) -> None:
        self._emit(Move(value=name, source=self.where[name], target=target))
        self._settle(name, target)

    def _settle(self, name: str, tier: Tier) -> None:
        self.where[name] = tier
        self.on_device.pop(name, None)
        if tier is Tier.DEVICE and not self.plan.values[name].pinned:
            self.on_device[name] = None

    def _belongs_on_device(self, name: str) -> bool:
        return Tier.DEVICE in self.plan.values[name].tiers

    def _bytes(self, names: list[str]) -> int:
        return sum(self.plan.values[name].nbytes for name in names)
