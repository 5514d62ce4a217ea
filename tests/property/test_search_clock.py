"""The clock of the search for windows: that of all of the plan, which it keeps up to date by itself.

The search counts what it changes and nothing else: seconds beyond compute, by stage. `Clock.seconds` goes over a whole
placement. Both have to say the same of what the search returns, or it improves something else than the plan's time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import Tier, unlimited
from engine.clock import home_s
from engine.hardware import HardwareProfile
from engine.needs import needs_of
from engine.placement import Placement
from engine.placer import Placer
from engine.plan import Plan
from engine.schedule import staging_need
from engine.windows import Search
from tests.property.test_schedules import FAST_FILES, SECONDS, random_plans

PROFILES = (SECONDS, FAST_FILES, replace(SECONDS, overlap=0.0), replace(SECONDS, overlap=1.0))


def housed(placer: Placer, search: Search) -> Placement:
    """Return what a search found with the homes that it assumes: the host, and the disk for what may not be there."""
    return placer.housed(search.placement(), unlimited(), staging_need(placer.needs.plan))


def making_homes_s(placer: Placer, placement: Placement) -> float:
    """Return the seconds that the homes of a placement take to make and to remove."""
    values = placer.needs.values
    return sum(home_s(placer.profile, values[number], home) for number, home in placement.homes.items())


def check(placer: Placer, search: Search) -> None:
    """Hold the two clocks against each other."""
    placement = housed(placer, search)
    beyond_s = placer.clock.seconds(placement) - placer.clock.total_compute_s
    assert search.seconds() <= beyond_s * (1 + 1e-9) + 1e-9
    assert search.seconds() + making_homes_s(placer, placement) == pytest.approx(beyond_s, rel=1e-9, abs=1e-9)


@given(data=st.data(), plan=random_plans(), profile=st.sampled_from(PROFILES))
@settings(max_examples=100)
def test_the_search_and_the_clock_say_the_same_seconds_but_for_those_of_making_homes(
    data: st.DataObject, plan: Plan, profile: HardwareProfile
) -> None:
    placer = Placer(needs=needs_of(plan, plan.ordered()), profile=profile)
    least, most = placer.needs.floor[0], placer.needs.everything_bytes
    caps = st.one_of(st.just(least), st.integers(least, max(least, most)), st.just(2 * most))
    search = placer.searched.begun(least)
    check(placer, search)
    for cap_bytes in sorted(data.draw(st.lists(caps, min_size=1, max_size=3))):
        search.cap_bytes = cap_bytes
        search.double_where_there_is_room(range(placer.needs.num_stages))
        search.improve_each()
        check(placer, search)
        search.improve(rounds=10)
        check(placer, search)


@given(plan=random_plans())
@settings(max_examples=40)
def test_a_home_where_the_search_did_not_expect_it_only_takes_longer(plan: Plan) -> None:
    placer = Placer(needs=needs_of(plan, plan.ordered()), profile=SECONDS)
    search = placer.searched.begun(placer.needs.floor[0])
    search.improve_each()
    assumed = housed(placer, search)
    values = placer.needs.values
    moved = {n: Tier.DISK if Tier.DISK in values[n].tiers else home for n, home in assumed.homes.items()}
    elsewhere = assumed.with_homes(moved, assumed.staging_bytes)
    assert placer.clock.seconds(elsewhere) >= placer.clock.total_compute_s + search.seconds() - 1e-9
