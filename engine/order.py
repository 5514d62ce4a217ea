"""What must run before what, and the one order that follows.

*Program order* is the order in which stages were added, but for stages that were added to a plan after its builder
handed it over: each of those comes right behind the last stage that it has to wait for, so that what it reads need not
live until the end of the run. Changes to accumulators and ordered Values happen in program order. The order of a plan
is program order as far as every Value is written before it is read, and else the nearest order in which it is.

Invariant: the order depends on the stages and on the order in which they were added alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import networkx as nx

from engine.errors import PlanError
from engine.origin import at
from engine.parts import Stage, Value, ValueKind

_IMMUTABLE = ValueKind.IMMUTABLE

_FIRST = -1
# Before every stage of the builder.


def program_order(stages: Collection[Stage], num_own: int) -> list[Stage]:
    """Return the stages in program order; all but the first ``num_own`` were added after the plan was handed over."""
    stages = list(stages)
    own, added = stages[:num_own], stages[num_own:]
    if not added:
        return own
    behind: dict[int, list[Stage]] = {}
    for place, stage in zip(_places(own, added), added, strict=True):
        behind.setdefault(place, []).append(stage)
    program = behind.get(_FIRST, [])
    for index, stage in enumerate(own):
        program.append(stage)
        program += behind.get(index, ())
    return program


def _places(own: Sequence[Stage], added: Sequence[Stage]) -> list[int]:
    """Return, for each added stage, the index of the stage of the builder's own that it comes behind."""
    changed = {name: index for index, stage in enumerate(own) for name in stage.changed}
    read: dict[str, int] = {}
    places: list[int] = []
    for stage in added:
        uses, changes = set(stage.used), stage.changed
        place = max([_FIRST, *(changed.get(n, _FIRST) for n in uses), *(read.get(n, _FIRST) for n in changes)])
        changed.update(dict.fromkeys(changes, place))
        read.update({name: max(place, read.get(name, _FIRST)) for name in uses - changes})
        places.append(place)
    return _sources_later(added, places)


def _sources_later(added: Sequence[Stage], places: list[int]) -> list[int]:
    """Move what waits for nothing of the builder's to where it is first needed: it need not live from the start."""
    next_use: dict[str, int] = {}
    next_change: dict[str, int] = {}
    for number in reversed(range(len(added))):
        uses, changes = set(added[number].used), added[number].changed
        if places[number] == _FIRST:
            needed = [next_use[n] for n in changes if n in next_use] + [
                next_change[n] for n in uses if n in next_change
            ]
            places[number] = min(needed, default=_FIRST)
        for seen, names in ((next_use, uses), (next_change, changes)):
            seen.update({name: min(places[number], seen.get(name, places[number])) for name in names})
    return places


class Dependencies:
    """The stages of a plan, in program order, with what ties them."""

    def __init__(self, plan_name: str, program: Sequence[Stage], values: Mapping[str, Value]) -> None:
        self.plan_name, self.program, self.values = plan_name, program, values

    def graph(self) -> nx.DiGraph[str]:
        """Return the stages as a networkx graph; an edge means "must run before", ``values`` on it says why."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(stage.name for stage in self.program)
        for source, target, value in self.edges():
            if graph.has_edge(source, target):
                graph.edges[source, target]["values"].append(value)
            else:
                graph.add_edge(source, target, values=[value])
        return graph

    def ordered(self) -> list[Stage]:
        """Check the plan and return its stages in its one order; see `engine.plan.Plan.ordered`."""
        rank = {stage.name: index for index, stage in enumerate(self.program)}
        if self._follows_program(rank):
            return list(self.program)
        graph = self.graph()
        try:
            return [self.program[rank[name]] for name in nx.lexicographical_topological_sort(graph, key=rank.get)]
        except nx.NetworkXUnfeasible:
            cycle = [self.program[rank[source]] for source, _ in nx.find_cycle(graph)]
            path = " -> ".join(stage.name for stage in [*cycle, cycle[0]])
            origins = ", ".join(f"{stage.name}: {stage.origin}" for stage in cycle if stage.origin)
            raise PlanError(
                f"plan {self.plan_name!r} has a cycle: {path}; one of these stages reads what a later one writes"
                f"{at(origins)}"
            ) from None

    def _follows_program(self, rank: Mapping[str, int]) -> bool:
        """Return whether every stage comes behind what it waits for; but for immutable Values all edges say so."""
        written_at = {name: rank[writers[0].name] for name, writers in self._checked_writers().items()}
        immutable = {name for name in written_at if self.values[name].kind is _IMMUTABLE}
        return all(
            written_at[name] < index
            for index, stage in enumerate(self.program)
            for name in stage.used
            if name in immutable and name not in stage.changed
        )

    def edges(self) -> Iterator[tuple[str, str, str]]:
        """Yield (before, after, Value) for everything that has to wait. Raises PlanError where a use is not allowed."""
        writers = self._checked_writers()
        changed_by: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        for stage in self.program:
            changes = stage.changed
            for name in stage.used:
                if self.values[name].kind is _IMMUTABLE:
                    if name not in changes:
                        yield writers[name][0].name, stage.name, name
                    continue
                if name in changed_by:
                    yield changed_by[name], stage.name, name
                if name in changes:
                    yield from ((reader, stage.name, name) for reader in readers.pop(name, ()))
                    changed_by[name] = stage.name
                else:
                    readers.setdefault(name, []).append(stage.name)

    def _checked_writers(self) -> dict[str, list[Stage]]:
        writers: dict[str, list[Stage]] = {}
        for stage in self.program:
            for name in stage.changed:
                writers.setdefault(name, []).append(stage)
        single = {name for name, by in writers.items() if len(by) == 1 and self.values[name].kind is _IMMUTABLE}
        done: dict[str, int] = {}
        for stage in self.program:
            for name in stage.used:
                if name in single:
                    continue
                if name in stage.changed:
                    done[name] = done.get(name, 0) + 1
                self._check_use(stage, self.values[name], done.get(name, 0), writers.get(name, ()))
        return writers

    def _check_use(self, stage: Stage, value: Value, done: int, writers: Sequence[Stage]) -> None:
        """Check a use of a Value that ``done`` of its writers have changed so far, this stage included."""
        reads = value.name not in stage.changed
        if not writers:
            raise PlanError(
                f"stage {stage.name!r} reads {value.name!r}, which no stage of plan {self.plan_name!r} writes"
                f"{at(stage.origin)}"
            )
        if value.kind is _IMMUTABLE:
            if len(writers) > 1:
                names = " and ".join(writer.name for writer in writers[:3])
                raise PlanError(f"Value {value.name!r} is immutable but is written by {names}{at(writers[1].origin)}")
            return
        if reads and not done:
            raise PlanError(
                f"stage {stage.name!r} reads {value.name!r} before any stage has written it{at(stage.origin)}"
            )
        if reads and value.kind is ValueKind.ACCUMULATOR and done < len(writers):
            late = writers[done]
            raise PlanError(
                f"stage {stage.name!r} reads accumulator {value.name!r} before {late.name!r} updates it"
                f"{at(stage.origin)}"
            )
