"""Cheap orders of a plan's stages, beside its own: what a scheduler may try.

Each is a list schedule: of the stages that may run next, the one that a rule prefers runs. All keep what
`engine.order.Dependencies` demands, so that every change of an accumulator or an ordered Value stays where it is in
program order: whatever order is taken, the bits are the same. A stage that touches no Value is there for an effect that
nothing here knows of: all others stay on the side of it that they are on in the plan.

The orders depend on the plan alone, on no budget and on no hardware, so a larger budget has all that a smaller one has.

- *Own*: the plan's.
- *Newest*: the stage that the last ones made possible: depth first, what is made is used at once.
- *Latest*: every stage as late as its readers allow, that is, newest in the reverse direction.
- *Leanest*: the stage that adds the fewest bytes to those that are alive.

Each takes the time of a sort. `improved` goes on from one of them: it moves one stage after
another to another place that it may have, and keeps what a given judge finds no slower.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.parts import Value
from engine.plan import Plan, Stage

Order = tuple[int, ...]
# Stages by number in the plan's own order.

_Neighbours = Sequence[set[int]]


@dataclass(frozen=True, kw_only=True)
class Ties:
    """What must run before (``before``) and behind (``behind``) every stage of a plan, by number in its own order.

    A stage without Values has all others on its two sides.
    """

    stages: Sequence[Stage]
    before: _Neighbours
    behind: _Neighbours

    @classmethod
    def of(cls, plan: Plan) -> Ties:
        """Return those of a plan."""
        stages = plan.ordered()
        number = {stage.name: index for index, stage in enumerate(stages)}
        behind: list[set[int]] = [set() for _ in stages]
        before: list[set[int]] = [set() for _ in stages]
        for source, target in plan.graph().edges:
            behind[number[source]].add(number[target])
            before[number[target]].add(number[source])
        for index in (index for index, stage in enumerate(stages) if not stage.used):
            before[index].update(range(index))
            behind[index].update(range(index + 1, len(stages)))
            for other in range(len(stages)):
                (behind if other < index else before)[other].update({index} - {other})
        return cls(stages=stages, before=before, behind=behind)

    @property
    def own(self) -> Order:
        """The plan's own order."""
        return tuple(range(len(self.stages)))

    @property
    def is_one_order(self) -> bool:
        """Whether the plan has no order but its own."""
        return all(index in self.behind[index - 1] for index in self.own[1:])


def orders_of(ties: Ties, values: Mapping[str, Value]) -> list[Order]:
    """Return the orders of a plan's stages, each once; the first is its own."""
    if ties.is_one_order:
        return [ties.own]
    newest, latest = _newest(ties.before, ties.behind), _latest(ties.before, ties.behind)
    return list(dict.fromkeys([ties.own, newest, latest, _leanest(ties, values)]))


def improved(ties: Ties, order: Order, judge: Callable[[Order], float], num_moves: int) -> Order:
    """Return what ``num_moves`` moves of a stage make of an order; a higher number of ``judge`` is worse."""
    rng = random.Random(0)
    best, least = list(order), judge(order)
    for _ in range(num_moves):
        stage = best[rng.randrange(len(best))]
        rest = [other for other in best if other != stage]
        first = max((place + 1 for place, other in enumerate(rest) if other in ties.before[stage]), default=0)
        last = min((place for place, other in enumerate(rest) if other in ties.behind[stage]), default=len(rest))
        place = rng.randint(first, last)
        moved = [*rest[:place], stage, *rest[place:]]
        if moved != best and (found := judge(tuple(moved))) <= least:
            best, least = moved, found
    return tuple(best)


def _newest(before: _Neighbours, behind: _Neighbours) -> Order:
    """Run what became possible last; of several the first of the plan."""
    waits = [len(each) for each in before]
    ready = [(0, index) for index, each in enumerate(waits) if not each]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for other in behind[index]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, (-len(order), other))
    return tuple(order)


def _latest(before: _Neighbours, behind: _Neighbours) -> Order:
    last = len(before) - 1

    def turned(sets: _Neighbours) -> list[set[int]]:
        return [{last - other for other in each} for each in reversed(sets)]

    return tuple(last - index for index in reversed(_newest(turned(behind), turned(before))))


def _leanest(ties: Ties, values: Mapping[str, Value]) -> Order:
    """Run what adds the fewest bytes; what it is the last to use is freed."""
    before, behind = ties.before, ties.behind
    used = [set(stage.used) for stage in ties.stages]
    users: dict[str, set[int]] = {}
    for index, names in enumerate(used):
        for name in names:
            users.setdefault(name, set()).add(index)
    alive: set[str] = set()

    def added(index: int) -> int:
        born = sum(values[name].nbytes for name in used[index] - alive)
        return born - sum(values[n].nbytes for n in used[index] if len(users[n]) == 1 and not values[n].keep)

    waits = [len(each) for each in before]
    prices = {index: added(index) for index, each in enumerate(waits) if not each}
    ready = [(price, index) for index, price in prices.items()]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        price, index = heapq.heappop(ready)
        if prices.get(index) != price:
            continue
        del prices[index]
        order.append(index)
        again = {other for name in used[index] - alive for other in users[name]}
        alive |= used[index]
        for name in used[index]:
            users[name].discard(index)
            if len(users[name]) == 1:
                again |= users[name]
        for other in behind[index]:
            waits[other] -= 1
        for other in (behind[index] | again) - {index}:
            if not waits[other]:
                prices[other] = added(other)
                heapq.heappush(ready, (prices[other], other))
    return tuple(order)
