"""Where Values are while they are not on the device: as many on the host as it has room for, the others on the disk.

A *home* is there from the first time that something is put into it until its Value dies. Values are given one in a
fixed order, by the seconds that a byte saves: the first of them the host's, as many as fit. The disk is used only if
it is needed, since it takes a buffer of the host through which everything passes (``staging_bytes``).

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.budget import Budget, Tier
from engine.errors import DoesNotFitError
from engine.needs import Needs, Numbers
from engine.placement import Event, Placement, Step
from engine.units import format_bytes


def housed(placement: Placement, order: Sequence[int], budget: Budget, staging_bytes: int) -> Placement:
    """Return ``placement`` with a home for everything that does not stay; ``order`` are the Values that may have one.

    Raises:
        DoesNotFitError: host and disk have no room for it.
    """
    needs = placement.needs
    leaving = [number for number in order if not placement.stays(number)]
    births = _home_births(placement, leaving)
    need = [number for number in leaving if births[number] <= needs.deaths[number]]
    fixed = [number for number in needs.outside if len(needs.values[number].tiers) == 1]
    streamed = any(needs.values[number].is_stored for number in fixed)
    room = _Room(needs=needs, births=births, budget=budget)
    hosted, others = room.split(need, budget.host_bytes - streamed * staging_bytes)
    if others and not streamed:
        hosted, others = room.split(need, budget.host_bytes - staging_bytes)
    homes = dict.fromkeys(hosted, Tier.HOST) | dict.fromkeys(others, Tier.DISK)
    homes |= {number: needs.values[number].tiers[0] for number in fixed}
    staging = staging_bytes if others or streamed else 0
    room.check(homes, staging)
    return placement.with_homes(homes, staging)


def _home_births(placement: Placement, numbers: Sequence[int]) -> Numbers:
    """Return from which stage on each Value has a home; after its death where it never has one."""
    births, (_, deaths) = placement.needs.births.copy(), placement.needs.lives
    for number in (number for number in numbers if number in placement.windows):  # others have one from birth
        first = next((step for step in placement.steps_of(number) if _makes_home(step)), None)
        births[number] = deaths[number] + 1 if first is None else first.stage + (not first.before)
    return births


def _makes_home(step: Step) -> bool:
    return step.event is Event.STORE or (step.event is Event.CREATE and step.at_home)


@dataclass(frozen=True, kw_only=True)
class _Room:
    """What homes take of host and disk, where Values have them from the stages ``births`` on."""

    needs: Needs
    births: Numbers
    budget: Budget

    def split(self, need: Sequence[int], host_bytes: int) -> tuple[list[int], list[int]]:
        """Return which Values get a home on the host, as many as fit, and which do not."""
        values = self.needs.values
        fixed = self._fixed(Tier.HOST)
        must = [n for n in need if Tier.DISK not in values[n].tiers]
        may = [n for n in need if Tier.DISK in values[n].tiers and Tier.HOST in values[n].tiers]
        low, high = 0, len(may)
        middle = high  # often there is room for all of them
        while low < high:
            peak = self._peak_bytes([*fixed, *must, *may[:middle]])
            low, high = (middle, high) if peak <= host_bytes else (low, middle - 1)
            middle = (low + high + 1) // 2
        never = [n for n in need if Tier.HOST not in values[n].tiers]
        return [*must, *may[:low]], [*may[low:], *never]

    def check(self, homes: Mapping[int, Tier], staging_bytes: int) -> None:
        """Raise DoesNotFitError where homes take more of a tier than it has; it names all such tiers."""
        extras = {Tier.HOST: staging_bytes, Tier.DISK: 0}
        found = [(tier, self._trouble(tier, homes, extra)) for tier, extra in extras.items()]
        troubles = [(str(tier), trouble) for tier, trouble in found if trouble is not None]
        if troubles:
            raise DoesNotFitError("; besides, ".join(told for _, told in troubles), report={"tier": troubles[0][0]})

    def _trouble(self, tier: Tier, homes: Mapping[int, Tier], extra: int) -> str | None:
        """Say by how much a tier is too small for its homes and ``extra`` bytes, if it is."""
        need = extra + self._peak_bytes([number for number, home in homes.items() if home is tier])
        if need <= self.budget[tier]:
            return None
        return self._fixed_trouble(tier, extra, need) or (
            f"{format_bytes(self._peak_bytes(list(homes)))} have to leave the device at one time, and "
            f"need {format_bytes(need)} ({need} bytes) of the {tier}{_of_it(extra)}, but the budget is "
            f"{format_bytes(self.budget.host_bytes)} of host and {format_bytes(self.budget.disk_bytes)} of "
            "disk; give more of either, or more device"
        )

    def _fixed_trouble(self, tier: Tier, extra: int, in_all: int) -> str | None:
        """Say what has to be on a tier and can be nowhere else, if that is too much already."""
        fixed = self._fixed(tier)
        need = extra + self._peak_bytes(fixed)
        if need <= self.budget[tier] or (not fixed and need < in_all):
            return None
        largest = max(fixed, key=lambda number: int(self.needs.home_bytes[number]), default=None)
        named = "" if largest is None else f", the largest of them {self.needs.names[largest]}"
        what = f"what can be nowhere else{named}," if fixed else "the buffer between device and disk"
        return (
            f"{what} takes {format_bytes(need)} ({need} bytes) of the {tier}{_of_it(extra) if fixed else ''}, but the "
            f"budget is {format_bytes(self.budget[tier])} of {tier}; give --budget {tier}={need} or more"
        )

    def _fixed(self, tier: Tier) -> list[int]:
        """Return the Values that live on a tier only."""
        return [number for number in self.needs.outside if self.needs.values[number].tiers == (tier,)]

    def _peak_bytes(self, numbers: Sequence[int]) -> int:
        return int(self.needs.homes_bytes(numbers, self.births).max(initial=0))


def _of_it(buffer_bytes: int) -> str:
    return f", {format_bytes(buffer_bytes)} of it the buffer between device and disk" if buffer_bytes else ""
