"""Which orders of its stages a plan is scheduled in: a portfolio, each placed exactly, the fastest kept.

A plan that is one of a builder's choices runs in its own order, which the builder has thought of, and so does a large
one. Any other plan has the orders of `engine.orders`. For each of a few *shares* of the device bytes, the one that is
*roughly* the fastest there is improved, and is placed as the plan's own is. Roughly means by chains and a packing, with
room on the host. So the orders that are placed depend on the plan and the hardware alone: a larger budget has the same,
and each is no slower for it.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from engine.hardware import HardwareProfile
from engine.needs import Needs, needs_of
from engine.orders import Order, Ties, improved, orders_of
from engine.placer import Placer
from engine.plan import Plan, Stage

MOST_STAGES = 64
# Of a plan that is tried in other orders: those whose placements are searched.

SHARES = (0.0, 0.2, 0.5)
# Of what the device may hold beyond the least, for which orders are looked for; most is gained where there is little.

MOVES_A_STAGE = 6
# Of an order that is improved.


def orders_to_try(plan: Plan) -> list[Order]:
    """Return the orders that a plan is looked at in, its own first."""
    if plan.choices or len(plan.ordered()) > MOST_STAGES:
        return [tuple(range(len(plan.ordered())))]
    return orders_of(Ties.of(plan), plan.values)


def leanest(plan: Plan) -> Needs:
    """Return the tables of a plan in that of its orders which needs the fewest device bytes."""
    own = needs_of(plan, plan.ordered())
    if not own.pinned:  # all else may leave, so that every order needs as much
        return own
    return min((own, *(_needs(plan, order) for order in orders_to_try(plan)[1:])), key=lambda needs: needs.floor[0])


def _needs(plan: Plan, order: Order) -> Needs:
    stages = plan.ordered()
    return needs_of(plan, [stages[number] for number in order])


@dataclass(frozen=True, kw_only=True)
class Portfolio:
    """Placers of a plan, one for each order that it is placed in."""

    plan: Plan
    profile: HardwareProfile

    @cached_property
    def own(self) -> Placer:
        """The placer of the plan's own order."""
        return Placer(needs=needs_of(self.plan, self.plan.ordered()), profile=self.profile)

    @cached_property
    def floor(self) -> tuple[int, Stage]:
        """The fewest device bytes that any schedule needs, and the stage that needs them."""
        return self._leanest.needs.floor

    def placers(self) -> Iterator[Placer]:
        """Yield those to place the plan with, its own order's first."""
        yield self.own
        yield from self._others

    @cached_property
    def _leanest(self) -> Placer:
        if not self.own.needs.pinned or len(self._orders) == 1:
            return self.own
        needs = leanest(self.plan)
        return self.own if needs.stages == self.own.needs.stages else Placer(needs=needs, profile=self.profile)

    @cached_property
    def _orders(self) -> list[Order]:
        return orders_to_try(self.plan)

    @cached_property
    def _others(self) -> list[Placer]:
        """The placers of other orders than the plan's own: that of the floor, and the fastest of every share."""
        if len(self._orders) == 1:
            return []
        orders = dict.fromkeys(self._fastest(share) for share in SHARES)
        placers = [self._placer(order) for order in orders if order != self._orders[0]]
        return placers if self._leanest is self.own else [self._leanest, *placers]

    def _placer(self, order: Order) -> Placer:
        return Placer(needs=_needs(self.plan, order), profile=self.profile)

    def _fastest(self, share: float) -> Order:
        """Return the order that is roughly the fastest within a share of the device bytes."""
        least, most = self.floor[0], self.own.everything_bytes
        device_bytes = least + int(share * max(0, most - least))

        def rough_s(order: Order) -> float:
            return self._placer(order).rough_s(device_bytes)

        start = min(self._orders, key=rough_s)
        return improved(Ties.of(self.plan), start, rough_s, MOVES_A_STAGE * len(start))
