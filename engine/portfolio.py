"""Which orders of its stages a plan is scheduled in: a portfolio, each placed exactly, the fastest kept.

A plan that is one of a builder's choices runs in its own order, which the builder has thought of. So does a large one,
and one with Values that live on the device only: when those are alive depends on the order, and with it the device
floor. Any other plan has the orders of `engine.orders`. For each of a few *shares* of the device bytes, the one that is
*roughly* the fastest there is improved, and is placed as the plan's own is. Roughly means by one pass of the search for
windows. So the orders that are placed depend on the plan and the hardware alone: a larger budget has the same, and each
is no slower for it.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from engine.hardware import HardwareProfile
from engine.needs import needs_of
from engine.orders import Order, Ties, improved, orders_of
from engine.placer import Placer
from engine.plan import Plan

MOST_STAGES = 64
# Of a plan that is tried in other orders: those whose placements are searched.

SHARES = (0.0, 0.2, 0.5)
# Of what the device may hold beyond the least, for which orders are looked for; most is gained where there is little.

MOVES_A_STAGE = 6
# Of an order that is improved.


@dataclass(frozen=True, kw_only=True)
class Portfolio:
    """Placers of a plan, one for each order that it is placed in. All of these have the same device floor."""

    plan: Plan
    profile: HardwareProfile

    @cached_property
    def own(self) -> Placer:
        """The placer of the plan's own order."""
        return Placer(needs=needs_of(self.plan, self.plan.ordered()), profile=self.profile)

    def placers(self) -> Iterator[Placer]:
        """Yield those to place the plan with, its own order's first."""
        yield self.own
        yield from self._others

    @cached_property
    def _others(self) -> list[Placer]:
        """The placers of other orders than the plan's own: those of every share."""
        needs = self.own.needs
        if self.plan.choices or needs.num_stages > MOST_STAGES or needs.pinned:
            return []
        ties = Ties.of(self.plan)
        orders = orders_of(ties, self.plan.values)
        if len(orders) == 1:
            return []
        found = dict.fromkeys(self._fastest(ties, orders, share) for share in SHARES)
        return [self._placer(order) for order in found if order != ties.own]

    def _placer(self, order: Order) -> Placer:
        stages = self.own.needs.stages
        return Placer(needs=needs_of(self.plan, [stages[number] for number in order]), profile=self.profile)

    def _fastest(self, ties: Ties, orders: list[Order], share: float) -> Order:
        """Return the order that is roughly the fastest within a share of the device bytes."""
        least, most = self.own.needs.floor[0], self.own.needs.everything_bytes
        device_bytes = least + int(share * max(0, most - least))

        def rough_s(order: Order) -> float:
            return self._placer(order).searched.rough_s(device_bytes)

        start = min(orders, key=rough_s)
        return improved(ties, start, rough_s, MOVES_A_STAGE * len(start))
