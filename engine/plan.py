"""What is to be computed: Values, Stages and the Plan that connects them.

A *Plan* is the directed acyclic graph of stages (`engine.parts` has Value and Stage).

Invariants, checked when a plan is put in order: names are unique; every Value that is used is written before; an
immutable Value has one writer; an accumulator is updated in program order and read only after all its updates; ordered
Values are accessed in program order; there is no cycle. Insertion order breaks ties, so a plan has one order.

A Value is born at its first write or update and dies after its last use unless ``keep`` is set.

A builder hands its plan over; what a person adds afterwards belongs to that person and is carried along when the plan
is lowered under other choices. This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import networkx as nx

from engine.budget import Tier
from engine.device_kind import DeviceKind, planned_kind
from engine.errors import PlanError
from engine.order import Dependencies, program_order
from engine.origin import at, caller_origin
from engine.parts import ALL_TIERS, ITEM_BYTES, Cost, Stage, Stream, TensorSpec, Value, ValueKind
from engine.units import KIB

__all__ = [
    "ALL_TIERS",
    "ITEM_BYTES",
    "PIECE_BYTES",
    "ChoiceSpace",
    "Choices",
    "Cost",
    "Plan",
    "Stage",
    "Stream",
    "Tap",
    "TensorSpec",
    "Value",
    "ValueKind",
    "movable",
]

Choices = Mapping[str, int]
"""What the planner may decide, by name: chunk_tokens, branches_at_once, ..."""

ONE_TENSOR = "tensor"
# The name of the tensor in a Value that has one.

_ON_DISK = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")
# Names that a Value can have in the store, where it is a path.

PIECE_BYTES = 256 * KIB
# Of a Value that a person declares: large enough that a file is worth its name, small enough for the host buffer that
# pieces pass through on their way to disk and back.

_SMALL_PIECE_BYTES, _MANY_PIECES = 4 * KIB, 1024
# Thousands of files below a block of the file system cost more than they free.


class ChoiceSpace(Protocol):
    """The plans that one plan could have been: the same work under other choices.

    Every choice has a ladder of values, along which the plan mostly gets slower and needs less. Combinations that are
    not declared are not looked at.
    """

    @property
    def ladders(self) -> Mapping[str, Sequence[int]]:
        """Every choice's values, from what is mostly the fastest to the leanest."""

    def declares(self, choices: Choices) -> bool:
        """Return whether a combination of values from the ladders is one that the planner may choose."""

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        """Return what all stages of ``sketch(choices)`` cost together at least, and how many they are at least."""

    def leanest(self) -> Sequence[Choices]:
        """Return choices among which those are that need the fewest device bytes of all that are declared."""

    @property
    def hindrance(self) -> str | None:
        """Why the plan could not be leaner by taking the model in parts; None if it could, or has no model."""

    @property
    def gradual(self) -> Collection[str]:
        """The choices that trade time for device bytes step by step; the planner takes them along one path."""

    def note_added(self, stage: Stage) -> None:
        """Take note of a stage that a person adds to one of the plans, which all of them have then."""

    def levers(self, stage: Stage) -> Sequence[str]:
        """Return the choices that may change what a stage like this one needs on the device: all, best first."""

    def lower(self, choices: Choices) -> Plan:
        """Return the plan under ``choices``."""

    def sketch(self, choices: Choices) -> Plan:
        """Return the plan under ``choices`` with each kind of step once."""

    def outline(self, choices: Choices) -> Plan:
        """Return a plan with the device floor of ``lower(choices)``, as small as can be."""


@dataclass(frozen=True, kw_only=True)
class Tap:
    """An optional extra output: ``run(context, path)`` is called right after the stage ``after``."""

    after: str
    run: Callable[[Any, str], None]


@dataclass(frozen=True, kw_only=True)
class ActualSizes:
    """What sizes turned out to be that were planned at their largest: workspace by stage, Values by name."""

    workspace_bytes: Mapping[str, int]
    values: Mapping[str, Value] = field(default_factory=dict)


@dataclass(kw_only=True)
class Plan:
    """The DAG of stages. Built by `value` and `add`; `ordered` checks it and remembers the order until the next stage.

    ``kind`` is the kind of device that it is made for. ``budget`` holds bytes by tier that the plan asks for unless the
    command line says otherwise. ``hooks`` are
    functions that are called by name (``audit`` and ``compare`` by the command line; ``actual``, which returns
    `ActualSizes`, after a run whose sizes were not all known before); ``taps`` are extra outputs by name
    (``gradients``). ``kept_folders`` are folders in the results for files that a resumed run finds again, since they
    must not be made twice (`engine.context.StageContext.keep_file`). ``choices`` says how the plan was lowered,
    ``space`` how else it could be.
    """

    name: str
    kind: DeviceKind = field(default_factory=planned_kind)
    choices: Choices = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    space: ChoiceSpace | None = None
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    taps: dict[str, Tap] = field(default_factory=dict)
    kept_folders: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    _order: list[Stage] = field(default_factory=list)
    _arrays: set[str] = field(default_factory=set)  # where Values' tensors are on disk, and the folders above them
    _folders: set[str] = field(default_factory=set)
    _own: tuple[int, int] | None = None  # how many stages and Values were there when it was handed over
    _numbers: dict[str, int] = field(default_factory=dict)  # the last number given to a repeated name

    # Building

    def value(self, value: Value) -> Value:
        """Declare a Value and return it. Raises PlanError if the name is taken or the Value can't be kept."""
        name, where = value.name, at(value.origin)
        _check_name("Value", name, where)
        if name in self.values:
            raise PlanError(f"plan {self.name!r} has two Values named {name!r}; give each a name of its own{where}")
        if value.provided and len(value.tiers) != 1:
            raise PlanError(f"Value {name!r} is provided by its stage, so it lives on one tier: name that one{where}")
        if not value.tiers or any(size < 1 for spec in value.tensors.values() for size in spec.shape):
            raise PlanError(f"Value {name!r} has no tier, or a tensor without elements: {dict(value.tensors)}{where}")
        if value.is_stored and not _ON_DISK.fullmatch(name):
            raise PlanError(f"Value {name!r} can't go to disk by that name; use letters, digits and _ . + - /{where}")
        self._check_paths(value)
        self.values[name] = value
        return value

    def _check_paths(self, value: Value) -> None:
        """Refuse a name that would be a folder of the disk where another Value's name is an array, or the other way."""
        paths = [f"{value.name}/{key}" for key in value.tensors]
        above = [value.name.rsplit("/", cut)[0] for cut in range(value.name.count("/") + 1)]
        taken = [path for path in above if path in self._arrays] or [path for path in paths if path in self._folders]
        if taken:
            raise PlanError(
                f"Value {value.name!r} can't be on disk beside the Value that has {taken[0]!r} there; "
                f"give it another name{at(value.origin)}"
            )
        self._arrays.update(paths)
        self._folders.update(above)

    def accumulator(self, name: str, tensors: TensorSpec | Mapping[str, TensorSpec]) -> Value:
        """Declare a Value that is born zero, changed by one stage after another and read after all of them."""
        return self._declare(name, tensors, ValueKind.ACCUMULATOR)

    def variable(self, name: str, tensors: TensorSpec | Mapping[str, TensorSpec]) -> Value:
        """Declare a Value that is born zero and changed and read in the order in which the stages were added."""
        return self._declare(name, tensors, ValueKind.ORDERED)

    def _declare(self, name: str, tensors: TensorSpec | Mapping[str, TensorSpec], kind: ValueKind) -> Value:
        named = {ONE_TENSOR: tensors} if isinstance(tensors, TensorSpec) else dict(tensors)
        return self.value(movable(name, named, kind=kind))

    def find(self, name: str) -> Value:
        """Return the Value of that name. Raises PlanError, with names like it, if there is none."""
        if name not in self.values:
            near = difflib.get_close_matches(name, self.values, n=5, cutoff=0.5)
            like = f"; there are {', '.join(near)}" if near else ""
            raise PlanError(f"plan {self.name!r} has no Value {name!r}{like}{_here()}")
        return self.values[name]

    def add(self, stage: Stage) -> Stage:
        """Add a stage and return it. Raises PlanError if the name is taken or a Value was not declared."""
        where = at(stage.origin)
        _check_name("stage", stage.name, where)
        if stage.name in self.stages:
            raise PlanError(
                f"plan {self.name!r} has two stages named {stage.name!r}; give each a name of its own{where}"
            )
        for name in stage.used:
            if name not in self.values:
                raise PlanError(
                    f"stage {stage.name!r} uses a Value {name!r} that plan {self.name!r} does not declare{where}"
                )
        seen = set(stage.resident())
        for stream in (stream for stream in stage.streams if stream.buffered):
            if twice := [name for name in stream.values if name in seen]:
                raise PlanError(
                    f"stage {stage.name!r} uses {twice[0]!r} in two ways at once; a Value is either resident or in one "
                    f"buffered stream{where}"
                )
            seen.update(stream.values)
        self.stages[stage.name] = stage
        self._order = []
        if self._own is not None and self.space is not None:
            self.space.note_added(stage)
        return stage

    def free_name(self, name: str) -> str:
        """Return ``name`` if no stage has it, else the first of ``name-2``, ``name-3``, ... that none has."""
        free = name
        while free in self.stages:
            self._numbers[name] = self._numbers.get(name, 1) + 1
            free = f"{name}-{self._numbers[name]}"
        return free

    # Lowering

    def hand_over(self) -> Plan:
        """Say that the plan is built, and return it: what is added from now on is carried to its other lowerings."""
        self._own = (len(self.stages), len(self.values))
        return self

    def lowered(self, choices: Choices) -> Plan:
        """Return the plan under ``choices``, with what was added to this one since it was handed over.

        Raises:
            PlanError: an added stage uses a Value that is not there under ``choices``, or has another size there.
        """
        if self.space is None:
            return self
        plan = self.space.lower(choices)
        if plan is self or self._own is None:
            return plan
        bare = plan._without_additions()
        bare.notes += [note for note in self.notes if note not in bare.notes]
        bare.hooks, bare.taps, bare.budget = self.hooks | bare.hooks, self.taps | bare.taps, self.budget
        for value in list(self.values.values())[self._own[1] :]:
            bare.value(value)
        for stage in list(self.stages.values())[self._own[0] :]:
            for name in stage.used:
                self._check_carried(stage, self.values[name], bare)
            bare.add(stage)
        return bare

    @property
    def ladders(self) -> Mapping[str, Sequence[int]]:
        """The values of every choice that the plan has; none where it could be no other."""
        return {} if self.space is None else self.space.ladders

    def sketched(self, choices: Choices) -> Plan:
        """Return the plan under ``choices`` with each kind of step once; a plan with additions as it is."""
        if self.space is None or self._has_additions():
            return self.lowered(choices)
        return self.space.sketch(choices)

    def outlined(self, choices: Choices) -> Plan:
        """Return a plan with the device floor of ``lowered(choices)``, as small as can be."""
        if self.space is None or self._has_additions():
            return self.lowered(choices)
        return self.space.outline(choices)

    def _has_additions(self) -> bool:
        return self._own is not None and self._own != (len(self.stages), len(self.values))

    def _without_additions(self) -> Plan:
        """Return a copy with what the builder made alone."""
        stages, values = self._own or (len(self.stages), len(self.values))
        return replace(
            self,
            notes=list(self.notes),
            values=dict(list(self.values.items())[:values]),
            stages=dict(list(self.stages.items())[:stages]),
            _order=[],
            _arrays=set(self._arrays),
            _folders=set(self._folders),
            _own=(stages, values),
            _numbers={},
        )

    def _check_carried(self, stage: Stage, value: Value, plan: Plan) -> None:
        there = plan.values.get(value.name)
        if there is not None and there.tensors == value.tensors:
            return
        here, other = _differing(self.choices, plan.choices), _differing(plan.choices, self.choices)
        trouble = "does not have" if there is None else "has with another size"
        raise PlanError(
            f"stage {stage.name!r} uses Value {value.name!r} of plan {self.name!r} under {here}, which the plan "
            f"{trouble} under {other}; use Values that are there under every choice, or fix the choices by hand"
            f"{at(stage.origin)}"
        )

    # Reading

    def buffer_bytes(self, stream: Stream) -> int:
        """Return the device bytes of a stream's buffer, if it comes to need one: its largest piece."""
        names = stream.values if stream.buffered else ()
        return self.kind.rounded(max([self.values[name].buffer_bytes for name in names], default=0))

    def bytes_on(self, tier: Tier, value: Value) -> int:
        """Return the bytes that a Value takes on a tier: on a device every tensor is an allocation of its own."""
        if tier is not Tier.DEVICE or self.kind.unit_bytes == 1:
            return value.nbytes
        return sum(self.kind.rounded(spec.nbytes) for spec in value.tensors.values())

    def workspace_bytes(self, stage: Stage) -> int:
        """Return the device bytes that a stage needs only while it runs, beyond its Values and buffers."""
        return stage.workspace_bytes + self.kind.kept_bytes

    def graph(self) -> nx.DiGraph[str]:
        """Return the stages as a networkx graph; an edge means "must run before", ``values`` on it says why."""
        return self._dependencies().graph()

    def ordered(self) -> list[Stage]:
        """Check the plan and return its stages in the one order that it has.

        Raises:
            PlanError: no stages, a cycle, an immutable Value with two writers, a Value that is used but never written,
                or an accumulator that is read before its last update.
        """
        if not self.stages:
            raise PlanError(f"plan {self.name!r} has no stages; add one")
        if not self._order:
            self._order = self._dependencies().ordered()
        return self._order

    def _dependencies(self) -> Dependencies:
        num_own = self._own[0] if self._own is not None else len(self.stages)
        return Dependencies(self.name, program_order(self.stages.values(), num_own), self.values)


def _here() -> str:
    return at(caller_origin())


def _differing(choices: Choices, others: Choices) -> str:
    """Return those of the choices that are not as in ``others``, as text."""
    return ", ".join(f"{key}={choice}" for key, choice in choices.items() if choice != others.get(key)) or "its choices"


def movable(
    name: str, tensors: Mapping[str, TensorSpec], *, kind: ValueKind = ValueKind.IMMUTABLE, origin: str | None = None
) -> Value:
    """Return a Value that may live wherever its size lets it, in pieces of a size that disks like.

    A Value that would be many tiny files stays off the disk.
    """
    cut = {key: replace(spec, piece_rows=_piece_rows(spec)) for key, spec in tensors.items()}
    tiny = any(s.piece_bytes < _SMALL_PIECE_BYTES and s.num_pieces > _MANY_PIECES for s in cut.values())
    tiers = (Tier.DEVICE, Tier.HOST) if tiny else ALL_TIERS
    return Value(name=name, tensors=cut, kind=kind, tiers=tiers, origin=caller_origin() if origin is None else origin)


def _piece_rows(spec: TensorSpec) -> int:
    """Return the rows of a piece: as many as `PIECE_BYTES` hold, of those numbers that divide all rows."""
    if not spec.shape or 0 in spec.shape or spec.piece_rows > 1:
        return spec.piece_rows
    return _largest_divisor(spec.shape[0], at_most=max(1, PIECE_BYTES // spec.piece_bytes))


@lru_cache(maxsize=1024)
def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _check_name(kind: str, name: object, where: str) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise PlanError(f"a {kind} is named {name!r}; give it a name of printable characters{where}")
