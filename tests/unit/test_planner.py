"""The planner: it pulls one lever at a time until the plan fits, and a refusal carries the smallest figure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.clock import copy_s
from engine.errors import DoesNotFitError
from engine.hardware import PROFILES
from engine.plan import Choices, Cost, Plan, Stage, TensorSpec, Value
from engine.planner import Forecast, Planner, forecast

CPU = PROFILES["cpu"]
REST_BYTES = 100


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


@dataclass
class Halving:
    """Two stages whose workspaces follow the choices ``rows`` and ``columns``, and whose time goes against them."""

    ladders: Mapping[str, Sequence[int]] = field(
        default_factory=lambda: {"rows": (8, 4, 2, 1), "columns": (8, 4, 2, 1)}
    )
    lowered: list[Choices] = field(default_factory=list)
    gradual: Sequence[str] = ()
    hindrance: str | None = None

    def declares(self, choices: Choices) -> bool:
        return True

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        return Cost(flops=sum(1e11 / number for number in choices.values())), len(choices)

    def leanest(self) -> list[Choices]:
        return [{"rows": 8, "columns": 1}, {"rows": 1, "columns": 1}]

    def note_added(self, stage: Stage) -> None: ...

    def levers(self, stage: Stage) -> list[str]:
        return [stage.name]

    def outline(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def sketch(self, choices: Choices) -> Plan:
        return self.lower(choices)

    def lower(self, choices: Choices) -> Plan:
        self.lowered.append(choices)
        plan = Plan(name="halving", choices=choices, space=self)
        kept = TensorSpec(shape=(REST_BYTES,), dtype="uint8")
        plan.value(Value(name="rest", tensors={"t": kept}, tiers=(Tier.DEVICE,)))
        for index, (name, number) in enumerate(choices.items()):
            plan.add(
                Stage(
                    name=name,
                    kind="work",
                    run=nothing,
                    reads=("rest",) if index else (),
                    writes=() if index else ("rest",),
                    workspace_bytes=1000 * number,
                    cost=Cost(flops=1e11 / number),
                )
            )
        return plan


def device(nbytes: int) -> Budget:
    return Budget(device_bytes=nbytes, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)


def halving(budget: Budget) -> Forecast:
    space = Halving()
    return forecast(space.lower({"rows": 8, "columns": 8}), budget, CPU)


def refusal(nbytes: int) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as raised:
        halving(device(nbytes))
    return raised.value


def test_where_everything_fits_the_fastest_choices_are_taken() -> None:
    assert halving(unlimited()).plan.choices == {"rows": 8, "columns": 8}


@pytest.mark.parametrize(
    ("nbytes", "choices"),
    [
        (8100, {"rows": 8, "columns": 8}),
        (8099, {"rows": 4, "columns": 4}),
        (4100, {"rows": 4, "columns": 4}),
        (2100, {"rows": 2, "columns": 2}),
        (1100, {"rows": 1, "columns": 1}),
    ],
)
def test_a_budget_missed_by_a_byte_pulls_the_next_lever_of_the_binding_stage(
    nbytes: int, choices: dict[str, int]
) -> None:
    found = halving(device(nbytes))
    assert found.plan.choices == choices
    assert found.peak_bytes[Tier.DEVICE] <= nbytes


def test_the_smallest_device_bytes_are_those_of_the_smallest_choices_whatever_was_chosen() -> None:
    for nbytes in (1100, 5000, UNLIMITED_BYTES):
        assert halving(device(nbytes)).smallest_device_bytes == 1100


def test_a_byte_below_the_smallest_is_refused_with_stage_need_and_remedy() -> None:
    error = refusal(1099)
    assert error.exit_code == 3
    assert str(error) == (
        "does not fit: stage rows needs 1.07 KiB (1100 bytes) on the device at the smallest choices, the budget has "
        "1.07 KiB (1099 bytes); give --budget device=1100 or more, or a smaller plan"
    )
    assert error.report == {
        "feasible": False,
        "budget_bytes": {"device": 1099, "host": UNLIMITED_BYTES, "disk": UNLIMITED_BYTES},
        "tier": "device",
        "binding_stage": "rows",
        "smallest_device_bytes": 1100,
        "num_stages": 2,
        "choices": {"rows": 1, "columns": 1},
    }


def test_only_choices_that_could_still_be_the_fastest_are_lowered() -> None:
    space = Halving()
    forecast(space.lower({"rows": 8, "columns": 8}), unlimited(), CPU)
    fastest = {"rows": 8, "columns": 8}
    assert [choices for choices in space.lowered if choices not in (fastest, *space.leanest())] == []


@pytest.mark.parametrize("nbytes", [1100, 1500, 2100, 4100, 8100, 20000])
def test_what_is_found_is_the_fastest_of_all_choices_that_fit(nbytes: int) -> None:
    space = Halving()
    fits = [
        forecast(replace(space.lower({"rows": rows, "columns": columns}), space=None), device(nbytes), CPU).makespan_s
        for rows, columns in itertools.product((8, 4, 2, 1), repeat=2)
        if 1000 * max(rows, columns) + REST_BYTES <= nbytes
    ]
    assert halving(device(nbytes)).makespan_s == min(fits)


def test_choices_that_are_fixed_are_taken_whatever_else_would_be_faster() -> None:
    space = Halving()
    planner = Planner(plan=space.lower({"rows": 8, "columns": 8}), profile=CPU, fixed={"rows": 2})
    assert planner.forecast(unlimited()).plan.choices == {"rows": 2, "columns": 8}
    assert planner.smallest[1] == 2100


def test_offers_begin_with_the_smallest_budget_hold_the_own_one_and_get_faster() -> None:
    space = Halving()
    planner = Planner(plan=space.lower({"rows": 8, "columns": 8}), profile=CPU)
    offers = planner.offers(planner.forecast(device(2500)))
    assert offers[0].device_bytes == planner.smallest[1] == 1100
    assert 2500 in [offer.device_bytes for offer in offers]
    assert all(after.seconds < before.seconds for before, after in itertools.pairwise(offers))
    assert offers[-1].choices == {"rows": 8, "columns": 8}


def spilling_plan() -> Plan:
    """A Value of 100 bytes that has to make room for a workspace of 100 bytes."""
    plan = Plan(name="spilling")
    spec = TensorSpec(shape=(100,), dtype="uint8")
    plan.value(Value(name="v", tensors={"t": spec}))
    plan.add(Stage(name="write", kind="work", run=nothing, writes=("v",)))
    plan.add(Stage(name="work", kind="work", run=nothing, workspace_bytes=100))
    plan.add(Stage(name="read", kind="work", run=nothing, reads=("v",)))
    return plan


def test_a_plan_that_fits_the_device_but_neither_host_nor_disk_is_refused_with_a_report_too() -> None:
    with pytest.raises(DoesNotFitError, match=r"100 B have to leave the device at one time, and need 100 B") as raised:
        forecast(spilling_plan(), Budget(device_bytes=150, host_bytes=99, disk_bytes=99), CPU)
    assert raised.value.report["feasible"] is False
    assert raised.value.report["tier"] == "disk"
    assert raised.value.report["smallest_device_bytes"] == 100


def test_a_refusal_names_every_tier_that_is_too_small() -> None:
    with pytest.raises(DoesNotFitError) as host_and_disk:
        forecast(spilling_plan(), Budget(device_bytes=150, host_bytes=0, disk_bytes=99), CPU)
    assert re.search(r"give --budget host=\d+ or more; besides, .* \(100 bytes\) of the disk", str(host_and_disk.value))
    assert host_and_disk.value.report["tier"] == "host"
    with pytest.raises(DoesNotFitError) as device_too:
        forecast(spilling_plan(), Budget(device_bytes=99, host_bytes=99, disk_bytes=99), CPU)
    assert re.search(r"--budget device=100 or more, .*; besides, .* \(100 bytes\) of the disk", str(device_too.value))
    assert device_too.value.report["tier"] == "device"


def file_plan() -> Plan:
    """A file of 100 bytes that its stage writes, and nothing else."""
    plan = Plan(name="file")
    spec = TensorSpec(shape=(100,), dtype="uint8")
    plan.value(Value(name="checkpoint", tensors={"t": spec}, tiers=(Tier.DISK,), provided=True, keep=True))
    plan.add(Stage(name="save", kind="work", run=nothing, writes=("checkpoint",)))
    return plan


def test_a_file_that_the_disk_has_no_room_for_is_named_with_the_budget_that_helps() -> None:
    refusal = r"nowhere else, the largest of them checkpoint, takes 100 B .* give --budget disk=100 or more"
    with pytest.raises(DoesNotFitError, match=refusal) as raised:
        forecast(file_plan(), Budget(device_bytes=1000, host_bytes=1000, disk_bytes=99), CPU)
    assert raised.value.report["tier"] == "disk"


def test_a_forecast_has_every_key_of_simulate_as_plain_data() -> None:
    moved_s = copy_s(CPU, spilling_plan().values["v"], Tier.DEVICE, Tier.HOST)
    data = forecast(spilling_plan(), device(150), CPU).as_dict()
    assert data == {
        "feasible": True,
        "budget_bytes": {"device": 150, "host": UNLIMITED_BYTES, "disk": UNLIMITED_BYTES},
        "peak_bytes": {"device": 100, "host": 100, "disk": 0},
        "workers": [
            {
                "peak_bytes": {"device": 100, "host": 100, "disk": 0},
                "busy_s": pytest.approx(3 * CPU.stage_s),
                "span": None,
            }
        ],
        "binding_stage": "write",
        "smallest_device_bytes": 100,
        "makespan_s": pytest.approx(2 * moved_s + 3 * CPU.stage_s),
        "compute_s": pytest.approx(3 * CPU.stage_s),
        "transfer_s": pytest.approx(2 * moved_s),
        "waited_s": pytest.approx(2 * moved_s),
        "bound": "arithmetic",
        "moved_bytes": {"device->host": 100, "host->device": 100},
        "num_stages": 3,
        "choices": {},
        "notes": [],
    }


def test_a_plan_without_a_space_is_scheduled_as_it_is() -> None:
    plan = spilling_plan()
    assert forecast(plan, unlimited(), CPU).plan is plan
