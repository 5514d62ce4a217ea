"""Prices of work from stages that were run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.fitting import FITTED, Observation, fit_profile, together
from engine.hardware import PROFILES, HardwareProfile
from engine.plan import Cost

CPU = PROFILES["cpu"]
OTHER = replace(
    CPU,
    name="other",
    flops_per_s=3 * CPU.flops_per_s,
    attention_flops_per_s=0.5 * CPU.attention_flops_per_s,
    memory_bytes_per_s=2 * CPU.memory_bytes_per_s,
    kernel_s=0.4 * CPU.kernel_s,
    stage_s=3 * CPU.stage_s,
)
# How much of each kind takes a hundredth of a second on the generic CPU.
UNITS = {kind: 0.01 / CPU.prices()[kind] for kind in FITTED}


def stages_on(profile: HardwareProfile, amounts: list[dict[str, float]]) -> list[Observation]:
    """Return observations without error of stages that do ``amounts`` of `UNITS`."""
    costs = [Cost(**{kind: number * UNITS[kind] for kind, number in row.items()}) for row in amounts]
    return [Observation(name="stage", cost=cost, seconds=profile.seconds(cost)) for cost in costs]


def mixed() -> list[dict[str, float]]:
    """Return stages that do much of one kind and a little of the others, short ones and long ones."""
    return [
        {kind: size * (5.0 if kind == most else 0.5) for kind in FITTED} for most in FITTED for size in (0.02, 1.0, 9.0)
    ]


def test_prices_of_another_machine_are_found_from_its_stages() -> None:
    found = fit_profile("found", stages_on(OTHER, mixed()), CPU)
    for field, value in asdict(OTHER).items():
        if field != "name":
            assert asdict(found)[field] == (value if isinstance(value, str) else pytest.approx(value, rel=0.05)), field


def test_what_stages_do_not_tell_stays_as_it_is_known() -> None:
    observations = stages_on(OTHER, [{"flops": size} for size in (0.1, 1.0, 10.0)])
    found = fit_profile("found", observations, CPU)
    assert found.flops_per_s == pytest.approx(OTHER.flops_per_s, rel=0.05)
    for kind in ("attention_flops_per_s", "attention_scores_per_s", "memory_bytes_per_s", "kernel_s"):
        assert getattr(found, kind) == pytest.approx(getattr(CPU, kind))


def test_transfers_are_not_fitted() -> None:
    found = fit_profile("found", stages_on(OTHER, mixed()), replace(CPU, overlap=0.25, copy_s=1.0))
    assert (found.overlap, found.copy_s, found.disk_read_bytes_per_s) == (0.25, 1.0, CPU.disk_read_bytes_per_s)


@given(st.lists(st.tuples(st.sampled_from(FITTED), st.floats(1e-5, 1e2), st.floats(1e-5, 1e2)), min_size=1, max_size=8))
def test_no_price_is_ever_nothing_whatever_was_measured(rows: list[tuple[str, float, float]]) -> None:
    observations = [
        Observation(name="stage", cost=Cost(**{kind: amount * UNITS[kind]}), seconds=seconds)
        for kind, amount, seconds in rows
    ]
    found = fit_profile("found", observations, CPU)
    assert all(price > 0 for price in found.prices().values())
    assert found.stage_s > 0


def test_nothing_can_be_fitted_to_nothing() -> None:
    with pytest.raises(UsageError, match="no stages at all"):
        fit_profile("found", [], CPU)


def test_a_plan_as_a_whole_is_not_underestimated_where_equal_stages_take_different_times() -> None:
    cost = Cost(flops=UNITS["flops"])
    stages = [Observation(name="stage", cost=cost, seconds=seconds) for seconds in (0.004, 0.01, 0.03, 0.006)]
    whole = together("plan", stages)
    alone, as_well = (fit_profile("found", rows, CPU) for rows in (stages, [*stages, whole]))
    assert whole.num_stages == 4
    assert alone.seconds(cost) < as_well.seconds(cost) <= whole.seconds / 4
