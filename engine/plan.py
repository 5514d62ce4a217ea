"""What is to be computed: Values, Stages and the Plan that connects them.

A *Value* is a named piece of intermediate state whose bytes are known at plan time. A *Stage* says which Values it
needs and how: *read*, *write* and *update* mean resident on the device while the stage runs; a *stream* goes through
a small buffer from wherever its Values live. A *Plan* is the directed acyclic graph of stages.

Invariants, checked when a plan is sealed: names are unique; every Value that is used is written before; an immutable
Value has one writer; an accumulator is updated in program order and read only after all its updates; ordered Values are
accessed in program order; there is no cycle. Insertion order breaks ties, so a plan has one order.

A Value is born at its first write or update and dies after its last use unless ``keep`` is set.
This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol

import msgpack
import networkx as nx

from engine.budget import Tier
from engine.errors import PlanError

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}

Choices = Mapping[str, int]
"""What the planner may decide, by name: chunk_tokens, branches_at_once, ..."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor that does not exist yet. Its *pieces* are its slices along the first axis."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"dtype={self.dtype!r} is not known; choose one of {', '.join(ITEM_BYTES)}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def num_pieces(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def piece_bytes(self) -> int:
        """Bytes of one slice along the first axis, which is what a stream moves at a time."""
        return self.nbytes // max(1, self.num_pieces)


class ValueKind(StrEnum):
    """How a Value may change."""

    IMMUTABLE = "immutable"  # one writer
    ACCUMULATOR = "accumulator"  # born zero; a chain of updates in program order; read after all of them
    ORDERED = "ordered"  # born zero; read and changed in program order (pages, weights)


ALL_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A named piece of intermediate state.

    ``tiers`` are those it may live on. ``provided`` Values are tensors or files that their stage makes itself;
    others are allocated for the stage before it runs. ``keep`` Values outlive the plan.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    kind: ValueKind = ValueKind.IMMUTABLE
    tiers: tuple[Tier, ...] = ALL_TIERS
    provided: bool = False
    keep: bool = False

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def pinned(self) -> bool:
        """True if it can live on the device only."""
        return self.tiers == (Tier.DEVICE,)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Values that a stage uses piece by piece, from wherever they live.

    Pieces of Values that are off the device pass through one buffer of the largest piece. A stream whose pieces are
    only written has no use for it (``buffered`` false).
    """

    values: tuple[str, ...]
    updates: bool = False
    buffered: bool = True


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a stage does, in units that a hardware profile turns into seconds."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            flops=self.flops + other.flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            num_kernels=self.num_kernels + other.num_kernels,
        )


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One unit of work. ``run`` takes the worker's context (`engine.worker.StageContext`).

    ``config`` is all that decides the result beside the inputs: it goes into the recipe key.
    ``workspace_bytes`` is what the stage needs on the device only while it runs, beyond its Values and buffers.
    """

    name: str
    kind: str
    run: Callable[[Any], None]
    config: Mapping[str, object] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    streams: tuple[Stream, ...] = ()
    workspace_bytes: int = 0
    cost: Cost = field(default_factory=Cost)

    def resident(self) -> Iterator[str]:
        """Yield the Values that are on the device while the stage runs."""
        yield from self.reads
        yield from self.updates
        yield from self.writes

    def changes(self) -> Iterator[str]:
        """Yield the Values that the stage writes or updates."""
        yield from self.writes
        yield from self.updates
        for stream in self.streams:
            if stream.updates:
                yield from stream.values

    def uses(self) -> Iterator[str]:
        """Yield every Value that the stage touches; one may come twice."""
        yield from self.resident()
        for stream in self.streams:
            yield from stream.values


class ChoiceSpace(Protocol):
    """The plans that one plan could have been: the same work under other choices."""

    def first(self) -> Choices:
        """Return the choices that are fastest where memory does not matter."""

    def leanest(self) -> Sequence[Choices]:
        """Return choices among which those are that need the fewest device bytes of all."""

    def leaner(self, choices: Choices, binding_stage: Stage) -> Choices | None:
        """Return choices that need fewer device bytes in ``binding_stage``; None if nothing is left to give."""

    def lower(self, choices: Choices) -> Plan:
        """Return the plan under ``choices``."""


@dataclass(frozen=True, kw_only=True)
class Tap:
    """An optional extra output: ``run(context, path)`` is called right after the stage ``after``."""

    after: str
    run: Callable[[Any, str], None]


@dataclass(kw_only=True)
class Plan:
    """The DAG of stages. Built by `value` and `add`; `ordered` checks it and remembers the order until the next stage.

    ``budget`` holds bytes by tier that the plan asks for unless the command line says otherwise. ``hooks`` are
    functions that the command line calls by name (``audit``, ``compare``); ``taps`` are extra outputs by name
    (``gradients``). ``choices`` says how it was lowered, ``space`` how else it could be.
    """

    name: str
    choices: Choices = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    space: ChoiceSpace | None = None
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    taps: dict[str, Tap] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    _order: list[Stage] = field(default_factory=list)

    def value(self, value: Value) -> Value:
        """Declare a Value and return it. Raises PlanError if the name is taken or the Value can't be kept."""
        if value.name in self.values:
            raise PlanError(f"plan {self.name!r} has two Values named {value.name!r}; give each a name of its own")
        if value.provided and len(value.tiers) != 1:
            raise PlanError(f"Value {value.name!r} is provided by its stage, so it lives on one tier: name that one")
        if not value.tiers or any(size < 1 for spec in value.tensors.values() for size in spec.shape):
            raise PlanError(f"Value {value.name!r} has no tier, or a tensor without elements: {dict(value.tensors)}")
        self.values[value.name] = value
        return value

    def add(self, stage: Stage) -> Stage:
        """Add a stage and return it. Raises PlanError if the name is taken or a Value was not declared."""
        if stage.name in self.stages:
            raise PlanError(f"plan {self.name!r} has two stages named {stage.name!r}; give each a name of its own")
        for name in stage.uses():
            if name not in self.values:
                raise PlanError(f"stage {stage.name!r} uses a Value {name!r} that plan {self.name!r} does not declare")
        seen = set(stage.resident())
        for stream in (stream for stream in stage.streams if stream.buffered):
            if twice := [name for name in stream.values if name in seen]:
                raise PlanError(
                    f"stage {stage.name!r} uses {twice[0]!r} in two ways at once; a Value is either resident or in one "
                    "buffered stream"
                )
            seen.update(stream.values)
        self.stages[stage.name] = stage
        self._order = []
        return stage

    def buffer_bytes(self, stream: Stream) -> int:
        """Return the device bytes of a stream's buffer, if it comes to need one: its largest piece."""
        movable = (self.values[name] for name in stream.values if not self.values[name].pinned)
        pieces = (spec.piece_bytes for value in movable for spec in value.tensors.values())
        return max(pieces, default=0) if stream.buffered else 0

    def graph(self) -> nx.DiGraph[str]:
        """Return the stages as a networkx graph; an edge means "must run before", ``values`` on it says why."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(self.stages)
        for source, target, value in self._dependencies():
            if graph.has_edge(source, target):
                graph.edges[source, target]["values"].append(value)
            else:
                graph.add_edge(source, target, values=[value])
        return graph

    def ordered(self) -> list[Stage]:
        """Check the plan and return its stages in the one order that it has.

        Raises:
            PlanError: no stages, a cycle, an immutable Value with two writers, a Value that is used but never written,
                or an accumulator that is read before its last update.
        """
        if not self.stages:
            raise PlanError(f"plan {self.name!r} has no stages; add one")
        if not self._order:
            rank = {name: index for index, name in enumerate(self.stages)}
            if all(rank[before] < rank[after] for before, after, _ in self._dependencies()):
                self._order = list(self.stages.values())
            else:
                self._order = [self.stages[name] for name in self._sorted(rank)]
        return self._order

    def _sorted(self, rank: Mapping[str, int]) -> list[str]:
        """Return the stages' names in dependency order where that is not the order in which they were added."""
        graph = self.graph()
        try:
            return list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
        except nx.NetworkXUnfeasible:
            cycle = [source for source, _ in nx.find_cycle(graph)]
            raise PlanError(
                f"plan {self.name!r} has a cycle: {' -> '.join([*cycle, cycle[0]])}; "
                "one of these stages reads what a later one writes"
            ) from None

    def _dependencies(self) -> Iterator[tuple[str, str, str]]:
        writers = self._writers()
        changed_by: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        for stage in self.stages.values():
            changes = set(stage.changes())
            for name in dict.fromkeys(stage.uses()):
                if self.values[name].kind is ValueKind.IMMUTABLE:
                    if name not in changes:
                        yield writers[name][0], stage.name, name
                    continue
                if name in changed_by:
                    yield changed_by[name], stage.name, name
                if name in changes:
                    yield from ((reader, stage.name, name) for reader in readers.pop(name, ()))
                    changed_by[name] = stage.name
                else:
                    readers.setdefault(name, []).append(stage.name)

    def _writers(self) -> dict[str, list[str]]:
        writers: dict[str, list[str]] = {}
        for stage in self.stages.values():
            for name in dict.fromkeys(stage.changes()):
                writers.setdefault(name, []).append(stage.name)
        seen: dict[str, int] = {}
        for stage in self.stages.values():
            changes = set(stage.changes())
            for name in dict.fromkeys(stage.uses()):
                self._check_use(stage, self.values[name], name in changes, writers.get(name, []), seen)
        return writers

    def _check_use(
        self, stage: Stage, value: Value, changes: bool, writers: Sequence[str], seen: dict[str, int]
    ) -> None:
        if not writers:
            raise PlanError(f"stage {stage.name!r} reads {value.name!r}, which no stage of plan {self.name!r} writes")
        if value.kind is ValueKind.IMMUTABLE:
            if len(writers) > 1:
                raise PlanError(f"Value {value.name!r} is immutable but is written by {' and '.join(writers[:3])}")
            return
        done = seen[value.name] = seen.get(value.name, 0) + changes
        if not changes and not done:
            raise PlanError(f"stage {stage.name!r} reads {value.name!r} before any stage has written it")
        if not changes and value.kind is ValueKind.ACCUMULATOR and done < len(writers):
            raise PlanError(
                f"stage {stage.name!r} reads accumulator {value.name!r} before {writers[done]!r} updates it"
            )


def digest(data: object) -> str:
    """Return a short stable hash of plain data (dicts with string keys, lists, numbers, strings)."""
    return hashlib.blake2b(msgpack.packb(_canonical(data)), digest_size=16).hexdigest()


def _canonical(data: object) -> object:
    if isinstance(data, Mapping):
        return [[key, _canonical(data[key])] for key in sorted(data)]
    if isinstance(data, list | tuple):
        return [_canonical(item) for item in data]
    if isinstance(data, str | int | float | bool | bytes | None):
        return data
    raise TypeError(f"only plain data goes into a recipe, not {type(data).__name__}: {data!r}")


def recipe_keys(stages: Iterable[Stage], code_version: str) -> dict[str, str]:
    """Return a key per stage: kind, code version, configuration and the keys of what it reads.

    Equal keys mean equal results; no content is hashed.
    """
    made_by: dict[str, str] = {}
    keys: dict[str, str] = {}
    for stage in stages:
        inputs = [[name, made_by.get(name, "")] for name in dict.fromkeys(stage.uses())]
        keys[stage.name] = digest([stage.kind, code_version, stage.config, inputs])
        made_by.update(dict.fromkeys(stage.changes(), keys[stage.name]))
    return keys
