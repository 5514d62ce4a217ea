"""Hardware profiles: a cost becomes seconds by a roofline, and a profile that is none is refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.hardware import PROFILES, HardwareProfile, load_profile
from engine.plan import Cost

ROUND = HardwareProfile(
    name="round",
    flops_per_s=100.0,
    memory_bytes_per_s=10.0,
    host_link_bytes_per_s=1.0,
    disk_bytes_per_s=0.5,
    kernel_s=2.0,
)


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost(), 0.0),
        (Cost(flops=300.0), 3.0),
        (Cost(moved_bytes=50.0), 5.0),
        (Cost(flops=300.0, moved_bytes=50.0), 5.0),
        (Cost(flops=300.0, moved_bytes=10.0, num_kernels=2), 7.0),
    ],
)
def test_a_stage_takes_the_longer_of_arithmetic_and_traffic_and_a_price_for_every_kernel(
    cost: Cost, seconds: float
) -> None:
    assert ROUND.seconds(cost) == seconds


def test_costs_add_up() -> None:
    total = Cost(flops=1, moved_bytes=2, num_kernels=3) + Cost(flops=10, moved_bytes=20, num_kernels=30)
    assert total == Cost(flops=11, moved_bytes=22, num_kernels=33)


@given(st.builds(Cost, flops=st.floats(0, 1e18), moved_bytes=st.floats(0, 1e15), num_kernels=st.floats(0, 1e6)))
def test_a_faster_machine_is_never_slower(cost: Cost) -> None:
    assert PROFILES["h200-sxm"].seconds(cost) <= PROFILES["h100-sxm"].seconds(cost) <= PROFILES["cpu"].seconds(cost)


@pytest.mark.parametrize("name", PROFILES)
def test_a_built_in_profile_is_found_by_its_name_and_says_it(name: str) -> None:
    assert load_profile(name).name == name


def test_a_profile_is_read_from_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(asdict(ROUND)))
    assert load_profile(str(path)) == ROUND


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no hardware profile 'abacus'; known: cpu, h100-sxm, h200-sxm"):
        load_profile("abacus")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be one JSON object with the fields disk_bytes_per_s, flops_per_s"),
        ('{"name": "x"}', "must be one JSON object with the fields"),
        (json.dumps({**asdict(ROUND), "extra": 1}), "must be one JSON object with the fields"),
        (json.dumps({**asdict(ROUND), "flops_per_s": 0}), "not positive numbers: {'flops_per_s': 0}"),
        (json.dumps({**asdict(ROUND), "kernel_s": "fast"}), "not positive numbers: {'kernel_s': 'fast'}"),
        (json.dumps({**asdict(ROUND), "kernel_s": float("nan")}), "not positive numbers: {'kernel_s': nan}"),
        (json.dumps({**asdict(ROUND), "kernel_s": True}), "not positive numbers: {'kernel_s': True}"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_profile(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
