"""The choices that a planner looks at, and in which order.

Every choice has a ladder of values from the fastest to the slowest. All combinations would be too many to lower, so
choices that are *gradual* share one axis: a path from the fastest values of all of them to the leanest, one step on one
ladder at a time, each time one that helps the stage that needs the most of the device there. Every other choice has an
axis of its own. A *place* says how far one has come on each axis.

Invariant: the lattice depends on the plan alone and never on a budget. This module is pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence

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


class Frontier:
    """Places that are still to be looked at, by the least seconds that they can take; none comes twice.

    ``least_s`` tells these of a place: infinite for one that is not to be looked at, nor what is behind it.
    """

    def __init__(self, sizes: Place, least_s: Callable[[Place], float]) -> None:
        self._sizes, self._least_s = sizes, least_s
        start = (0,) * len(sizes)
        self._heap: list[tuple[float, Place]] = [(least_s(start), start)]
        self._seen = {start}

    def pop(self) -> tuple[float, Place] | None:
        """Return the next place, with the least seconds that are known of it."""
        return heapq.heappop(self._heap) if self._heap else None

    def push(self, least_s: float, place: Place) -> None:
        heapq.heappush(self._heap, (least_s, place))

    def push_further(self, least_s: float, place: Place, axes: Collection[int]) -> None:
        """Put in what is one step further on each of ``axes``."""
        for axis in axes:
            further = (*place[:axis], place[axis] + 1, *place[axis + 1 :])
            if further[axis] < self._sizes[axis] and further not in self._seen:
                self._seen.add(further)
                if (own_s := self._least_s(further)) < math.inf:
                    self.push(max(least_s, own_s), further)
