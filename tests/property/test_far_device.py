"""Plans on a device whose memory is its own: the same bits as on the CPU, within what its allocator would take."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.device import CpuDevice, Device
from engine.driver import drive
from engine.plan import Plan
from engine.schedule import device_floor, make_schedule, staging_need
from engine.store import Store
from engine.worker import TorchMachine
from tests.far_device import FAR, FarDevice
from tests.property.test_schedules import SECONDS, random_plans, scheduled, total_bytes


def executed(plan: Plan, budget: Budget, device: Device) -> tuple[dict[str, object], dict[Tier, int], dict[Tier, int]]:
    """Return results, measured peaks and planned ones."""
    schedule = make_schedule(plan, budget, SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        store, meter = Store.create(Path(folder) / "store"), device.meter()
        machine = TorchMachine(plan, meter=meter, store=store, directory=Path(folder), device=device)
        with meter:
            ledger = drive(plan, schedule, budget, machine)
        peak = {Tier.DEVICE: meter.peak["device"], Tier.HOST: meter.peak["host"], Tier.DISK: store.peak_bytes}
    return machine.results, peak, dict(ledger.peak)


@given(data=st.data(), plan=random_plans(most_stages=12))
@settings(max_examples=40)
def test_a_far_device_gives_the_same_bits_and_keeps_to_the_bytes_that_are_planned_for_it(
    data: st.DataObject, plan: Plan
) -> None:
    far = replace(plan, kind=FAR)
    floor, staging = device_floor(far)[0], staging_need(far)
    assert staging == 2 * staging_need(plan)
    budget = Budget(
        device_bytes=floor + data.draw(st.integers(0, total_bytes(plan))),
        host_bytes=staging + data.draw(st.sampled_from((0, UNLIMITED_BYTES - staging))),
        disk_bytes=UNLIMITED_BYTES,
    )
    assume(scheduled(far, budget) is not None)
    results, measured, planned = executed(far, budget, FarDevice())
    expected, _, _ = executed(plan, unlimited(), CpuDevice())
    assert results == expected
    assert planned[Tier.DEVICE] - FAR.kept_bytes <= measured[Tier.DEVICE]
    assert all(measured[tier] <= planned[tier] for tier in Tier)
    assert measured[Tier.HOST] == planned[Tier.HOST]
