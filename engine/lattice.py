"""The choices that a planner looks at, and in which order.

Every choice has a ladder of values from the fastest to the slowest. All combinations would be too many to lower, so
choices that are *gradual* share one axis: a path from the fastest values of all of them to the leanest, one step on one
ladder at a time, each time one that helps the stage that needs the most of the device there. Every other choice has an
axis of its own. A *place* says how far one has come on each axis.

What is looked at first is what may take the least seconds. These need not rise along an axis (a wave of unequal
branches is padded to the longest), so what is known of a place with all that is further on is the least of all of them.

Invariant: the lattice depends on the plan alone and never on a budget. This module is pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, product

from engine.plan import Choices

Place = tuple[int, ...]


class Lattice:
    """The combinations of choices; ``binding`` names those that help the stage that binds, the first to pull first."""

    def __init__(
        self,
        ladders: Mapping[str, Sequence[int]],
        gradual: Collection[str],
        *,
        binding: Callable[[Choices], Sequence[str]],
    ) -> None:
        self._gradual = [name for name in ladders if name in gradual]
        others = [name for name in ladders if name not in gradual]
        self._axes: list[list[Choices]] = [[{name: value} for value in ladders[name]] for name in others]
        self._names: list[Collection[str]] = [[name] for name in others]
        if self._gradual:
            self._axes.append(_path(ladders, self._gradual, binding))
            self._names.append(self._gradual)
        self._order = list(ladders)

    @property
    def sizes(self) -> Place:
        """How many steps each axis has."""
        return tuple(map(len, self._axes))

    @property
    def every_axis(self) -> Collection[int]:
        return range(len(self._axes))

    def axes_of(self, names: Collection[str]) -> list[int]:
        """Return the axes on which any of the named choices changes."""
        return [axis for axis, mine in enumerate(self._names) if any(name in names for name in mine)]

    def bounds(self, own_s: Callable[[Choices], float]) -> Bounds:
        """Return the bounds that follow from the least seconds of choices; infinite for what is not to be looked at."""
        own = {place: own_s(self.choices(place)) for place in product(*map(range, self.sizes))}
        beyond: dict[Place, float] = {}
        for place in reversed(own):
            further = (beyond.get(_step(place, axis), math.inf) for axis in self.every_axis)
            beyond[place] = min(own[place], *further, math.inf)
        return Bounds(own_s=own, beyond_s=beyond)

    def choices(self, place: Place) -> Choices:
        """Return the choices at a place, in the order of the ladders."""
        found: dict[str, int] = {}
        for axis, step in zip(self._axes, place, strict=True):
            found |= axis[step]
        return {name: found[name] for name in self._order}


def _path(
    ladders: Mapping[str, Sequence[int]], gradual: Sequence[str], binding: Callable[[Choices], Sequence[str]]
) -> list[Choices]:
    """Return the steps from the fastest to the leanest values of the gradual choices."""
    at = dict.fromkeys(ladders, 0)
    steps: list[Choices] = []
    while True:
        steps.append({name: ladders[name][at[name]] for name in gradual})
        left = [name for name in gradual if at[name] + 1 < len(ladders[name])]
        if not left:
            return steps
        helpful = [name for name in binding({name: ladders[name][at[name]] for name in ladders}) if name in left]
        at[(helpful or left)[0]] += 1


def _step(place: Place, axis: int) -> Place:
    return (*place[:axis], place[axis] + 1, *place[axis + 1 :])


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The least seconds of the choices at every place, and of those there and at all places further on."""

    own_s: Mapping[Place, float]
    beyond_s: Mapping[Place, float]


@dataclass(frozen=True, kw_only=True, order=True)
class Item:
    """Something to be looked at: choices, or the choices of ``place`` with all that is further on.

    Nothing of it takes less than ``least_s``.
    """

    least_s: float
    number: int
    choices: Choices = field(compare=False)
    place: Place | None = field(default=None, compare=False)


class Frontier:
    """What is still to be looked at, by the least seconds that it can take; no place and no choices come twice."""

    def __init__(self, lattice: Lattice, bounds: Bounds) -> None:
        self._lattice, self._bounds = lattice, bounds
        self._heap: list[Item] = []
        self._numbers = count()
        self._seen: set[Hashable] = set()
        self._open((0,) * len(lattice.sizes))

    def pop(self, below_s: float) -> Item | None:
        """Return the next item that may take less than ``below_s``; None where there is none."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0].least_s < below_s else None

    def add(self, least_s: float, choices: Choices) -> None:
        """Put in choices, unless they were there."""
        key = frozenset(choices.items())
        if key not in self._seen:
            self._seen.add(key)
            self.put_back(least_s, choices)

    def put_back(self, least_s: float, choices: Choices) -> None:
        """Put in choices of which more is known now."""
        heapq.heappush(self._heap, Item(least_s=least_s, number=next(self._numbers), choices=choices))

    def open_further(self, place: Place, axes: Collection[int]) -> None:
        """Put in what is one step further on each of ``axes``."""
        for axis in axes:
            self._open(_step(place, axis))

    def _open(self, place: Place) -> None:
        if place in self._bounds.beyond_s and place not in self._seen:
            self._seen.add(place)
            least_s, choices = self._bounds.beyond_s[place], self._lattice.choices(place)
            heapq.heappush(self._heap, Item(least_s=least_s, number=next(self._numbers), choices=choices, place=place))
