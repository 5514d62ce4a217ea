"""Hardware profiles: a cost becomes seconds by a price list, and a profile that is none is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import Tier
from engine.clock import copy_s
from engine.errors import UsageError
from engine.hardware import PROFILES, HardwareProfile, load_profile
from engine.plan import Cost, TensorSpec, Value

ROUND = HardwareProfile(
    name="round",
    flops_per_s=100.0,
    attention_flops_per_s=50.0,
    attention_backward_flops_per_s=25.0,
    attention_scores_per_s=20.0,
    memory_bytes_per_s=10.0,
    weight_bytes_per_s=5.0,
    kernel_s=2.0,
    stage_s=1.0,
    host_link_bytes_per_s=8.0,
    fresh_bytes_per_s=16.0,
    copy_s=0.25,
    disk_read_bytes_per_s=4.0,
    disk_write_bytes_per_s=2.0,
    file_s=0.5,
    array_s=1.0,
    saved_bytes_per_s=4.0,
    overlap=0.75,
)
DEVICE, HOST, DISK = Tier
NUMBERS = {item.name: st.floats(0, 1e18) for item in fields(Cost)}


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost(), 1.0),
        (Cost(flops=300.0), 4.0),
        (Cost(attention_flops=300.0, attention_backward_flops=50.0, attention_scores=40.0), 11.0),
        (Cost(moved_bytes=50.0), 6.0),
        (Cost(weight_bytes=50.0), 11.0),
        (Cost(read_bytes=8.0, written_bytes=8.0), 6.0),
        (Cost(flops=300.0, moved_bytes=10.0, num_kernels=2), 9.0),
    ],
)
def test_a_stage_takes_the_sum_of_what_its_work_costs_and_a_price_of_its_own(cost: Cost, seconds: float) -> None:
    assert ROUND.seconds(cost) == seconds


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (DEVICE, HOST, 16 / 8 + 2 * 0.25),
        (HOST, DEVICE, 16 / 8 + 2 * 0.25),
        (DEVICE, DISK, 16 / 8 + 16 / 2 + 2 * 0.75),
        (DISK, DEVICE, 16 / 8 + 16 / 4 + 2 * 0.75),
        (HOST, DISK, 16 / 2 + 2 * 0.5),
        (DISK, HOST, 16 / 4 + 2 * 0.5),
    ],
)
def test_a_transfer_takes_its_bytes_over_every_link_it_crosses_and_a_price_for_each_piece(
    source: Tier, target: Tier, seconds: float
) -> None:
    assert ROUND.transfer_s(source, target, nbytes=16, num_pieces=2) == seconds


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (DEVICE, HOST, 16 / 8 + 2 * 0.25 + 16 / 16),
        (HOST, DEVICE, 16 / 8 + 2 * 0.25 + 16 / 16),
        (DEVICE, DISK, 16 / 8 + 16 / 2 + 4 * 0.75),
        (DISK, DEVICE, 16 / 8 + 16 / 4 + 4 * 0.75 + 16 / 16),
    ],
)
def test_a_whole_value_takes_its_memory_anew_and_on_disk_a_file_for_each_piece(
    source: Tier, target: Tier, seconds: float
) -> None:
    two_pieces = TensorSpec(shape=(2, 1), dtype="float32")
    assert copy_s(ROUND, Value(name="v", tensors={"a": two_pieces, "b": two_pieces}), source, target) == seconds


def test_no_copy_of_a_value_to_the_disk_takes_less_than_one_to_the_host() -> None:
    cached = replace(ROUND, disk_write_bytes_per_s=1e9, file_s=0.0)
    value = Value(name="v", tensors={"a": TensorSpec(shape=(2, 1), dtype="float32")})
    assert cached.transfer_s(DEVICE, DISK, 8, 2) < copy_s(cached, value, DEVICE, HOST)
    assert copy_s(cached, value, DEVICE, DISK) == copy_s(cached, value, DEVICE, HOST)


def test_transfers_beside_compute_are_hidden_as_far_as_they_overlap() -> None:
    assert ROUND.together_s(8.0, 4.0, 3.0) == 8.0 + 0.25 * 4.0 + 3.0
    assert ROUND.together_s(4.0, 8.0, 0.0) == 8.0 + 0.25 * 4.0


def test_costs_add_up_and_can_be_repeated() -> None:
    total = Cost(flops=1, moved_bytes=2, num_kernels=3) + Cost(flops=10, moved_bytes=20, num_kernels=30)
    assert total == Cost(flops=11, moved_bytes=22, num_kernels=33)
    assert Cost(flops=1, attention_scores=2).times(3) == Cost(flops=3, attention_scores=6)


@given(profile=st.sampled_from(sorted(PROFILES)), less=st.builds(Cost, **NUMBERS), more=st.builds(Cost, **NUMBERS))
def test_more_work_never_takes_less_time(profile: str, less: Cost, more: Cost) -> None:
    assert PROFILES[profile].seconds(less) <= PROFILES[profile].seconds(less + more)


@given(st.builds(Cost, **NUMBERS))
def test_a_faster_machine_is_never_slower(cost: Cost) -> None:
    assert PROFILES["h200-sxm"].seconds(cost) <= PROFILES["h100-sxm"].seconds(cost) <= PROFILES["cpu"].seconds(cost)


@pytest.mark.parametrize("name", PROFILES)
def test_a_built_in_profile_is_found_by_its_name_and_says_it(name: str) -> None:
    assert load_profile(name).name == name


def test_a_profile_is_read_from_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(ROUND.to_json())
    assert load_profile(str(path)) == ROUND


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="no hardware profile 'abacus'; known: a100-sxm, cpu, h100-sxm, h20, h200-sxm, rtx-4090"
    ):
        load_profile("abacus")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be one JSON object with the fields array_s, attention_backward_flops_per_s"),
        ('{"name": "x"}', "missing fields: array_s, attention_backward_flops_per_s, "),
        (json.dumps({**asdict(ROUND), "extra": 1}), "missing fields: none; unknown fields: 'extra'"),
        (json.dumps({**asdict(ROUND), "name": 3}), "out of range: {'name': 3}"),
        (json.dumps({**asdict(ROUND), "flops_per_s": 0}), "out of range: {'flops_per_s': 0}"),
        (json.dumps({**asdict(ROUND), "flops_per_s": float("inf")}), "out of range: {'flops_per_s': inf}"),
        (json.dumps({**asdict(ROUND), "kernel_s": -1}), "out of range: {'kernel_s': -1}"),
        (json.dumps({**asdict(ROUND), "kernel_s": "fast"}), "out of range: {'kernel_s': 'fast'}"),
        (json.dumps({**asdict(ROUND), "kernel_s": float("nan")}), "out of range: {'kernel_s': nan}"),
        (json.dumps({**asdict(ROUND), "kernel_s": True}), "out of range: {'kernel_s': True}"),
        (json.dumps({**asdict(ROUND), "overlap": 1.5}), "out of range: {'overlap': 1.5}"),
        (json.dumps({**asdict(ROUND), "flops_per_s": 1e-300}), "out of range: {'flops_per_s': 1e-300}"),
        (json.dumps({**asdict(ROUND), "memory_bytes_per_s": 1e22}), "from 1 to 1e+21"),
        (json.dumps({**asdict(ROUND), "flops_per_s": 10**400}), "out of range: {'flops_per_s': 1000000"),
        (json.dumps({**asdict(ROUND), "kernel_s": 1e9}), "from 0 to 3600"),
        (json.dumps({**asdict(ROUND), "flops_per_s": int("9" * 4000)}).replace("999", "99999"), "is not JSON"),
        (json.dumps({**asdict(ROUND), "name": "a" * 1000}), "out of range: {'name': 'aaa"),
        (json.dumps({**asdict(ROUND), "name": "two\nlines"}), "name is a line of text"),
        (json.dumps({**asdict(ROUND), "name": "\ud800"}), "name is a line of text"),
        (json.dumps({**asdict(ROUND), **{"\n" * 300 + str(n): n for n in range(99)}}), "unknown fields: '\\n\\n"),
        (json.dumps({**asdict(ROUND), "name": [[1]]}), "out of range: {'name': a list}"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"name": ' + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_profile(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 600


@pytest.mark.parametrize("written", [b"\xff\xfe\x00", b""], ids=["no text", "nothing"])
def test_a_file_without_json_is_refused(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(written)
    with pytest.raises(UsageError, match="is not JSON"):
        load_profile(str(path))


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0", "\n"], ids=["long", "nul", "line"])
def test_a_name_that_can_be_no_file_is_an_unknown_profile(name: str) -> None:
    with pytest.raises(UsageError, match="no hardware profile") as raised:
        load_profile(name)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize("name", ["flops_per_s", "host_link_bytes_per_s", "saved_bytes_per_s"])
@pytest.mark.parametrize("rate", [1, 10**21])
def test_the_slowest_and_the_fastest_machine_that_a_file_may_tell_of_have_times_that_are_numbers(
    tmp_path: Path, name: str, rate: int
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**asdict(ROUND), name: rate}))
    found = load_profile(str(path))
    everything = Cost(**{item.name: 1e18 for item in fields(Cost)})
    assert 0 < found.seconds(everything) + found.transfer_s(DEVICE, DISK, 2.0**62, 1) < 1e20
