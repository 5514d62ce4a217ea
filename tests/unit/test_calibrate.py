"""Calibration: a short one, whose figures are rough, but are figures of this machine."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import calibrate as calibration
from engine.__main__ import main
from engine.calibrate import Calibration, calibrate, implausible
from engine.hardware import PROFILES, load_profile
from engine.loader import find_plan

SMALL = {"prompt_tokens": "200", "chunk_tokens": "64", "response_tokens": "8", "group_size": "2"}


@pytest.mark.parametrize("settings", [*find_plan("calibration").measured, {}], ids=str)
def test_every_plan_that_is_measured_can_be_built(settings: dict[str, str]) -> None:
    assert find_plan("calibration").plan(settings).stages


def test_a_measured_profile_can_be_loaded_and_fits_the_stages_it_is_of(tmp_path: Path) -> None:
    told: list[str] = []
    found = calibrate(
        "mine", [partial(find_plan("calibration").plan, SMALL)], rounds=2, tell=told.append, clock=time.process_time
    )
    path = tmp_path / "mine.json"
    path.write_text(found.profile.to_json())
    assert load_profile(str(path)) == found.profile
    assert found.profile.name == "mine"
    assert told[0] == "measuring transfers"
    kinds = {item.name.split()[0] for item in found.observations}
    assert {"prefill", "score", "replay", "sweep", "checkpoint"} <= kinds
    assert "load" not in kinds
    measured_s = sum(item.seconds for item in found.observations)
    assert sum(found.profile.seconds(item.cost) for item in found.observations) == pytest.approx(measured_s, rel=0.5)


@given(rate=st.floats(1e6, 1e12), price_s=st.floats(0.0, 1e-3))
def test_a_line_through_two_sizes_gives_the_rate_and_the_price_that_made_them(rate: float, price_s: float) -> None:
    small, large = (nbytes / rate + price_s for nbytes in (calibration._SMALL_BYTES, calibration._LARGE_BYTES))
    found_rate, found_s = calibration._line(small, large)
    if price_s < 5 * calibration._LARGE_BYTES / rate:
        assert found_rate == pytest.approx(rate, rel=1e-6)
        assert found_s == pytest.approx(price_s, rel=1e-6, abs=1e-12)
    assert found_rate > 0
    assert found_s >= 0


def test_what_the_link_takes_is_no_part_of_the_disk_or_of_new_memory_but_something_is_left() -> None:
    assert calibration._beyond(3.0, 1.0) == 2.0
    assert calibration._beyond(3.0, 5.0) == pytest.approx(0.3)
    ticks = itertools.count()
    found = calibration._fresh_bytes_per_s(4.0 * calibration._FRESH_BYTES, 2, lambda: float(next(ticks)))
    beyond_s = 1.0 - 0.25  # a copy takes a second by that clock, of which the link a quarter
    assert found == pytest.approx(calibration._FRESH_BYTES / beyond_s)


def doubts(share: float = 1.0, **fields: Any) -> list[str]:
    profile = replace(PROFILES["cpu"], **fields)
    return Calibration(profile=profile, observations=(), processor_share=share).doubts()


def test_plans_that_seldom_had_a_processor_say_that_the_machine_is_busy() -> None:
    assert not doubts()
    (text,) = doubts(0.42)
    assert text == (
        "warning: plans had a processor for 42 % of their time, so the machine seems busy; "
        "measure again on an idle machine"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"disk_read_bytes_per_s": 5e10, "host_link_bytes_per_s": 4e8}, "disk_read_bytes_per_s is 5e+10, much more"),
        ({"disk_write_bytes_per_s": 5e12}, "disk_write_bytes_per_s is 5e+12, much more than host_link_bytes_per_s"),
        ({"copy_s": 0.0, "file_s": 0.0}, "copy_s, file_s: measured as nothing"),
        ({"array_s": 0.0}, "array_s: measured as nothing"),
    ],
)
def test_a_figure_that_can_hardly_be_true_is_told(fields: dict[str, float], words: str) -> None:
    assert any(words in text for text in doubts(**fields))


def test_no_overlap_is_doubtful_only_where_a_core_was_free_to_copy() -> None:
    alone = replace(PROFILES["cpu"], overlap=0.0)
    assert implausible(alone, spare_cores=True)
    assert not implausible(alone, spare_cores=False)


def test_doubts_are_told_when_everything_is_measured() -> None:
    told: list[str] = []
    found = calibrate("mine", [partial(find_plan("calibration").plan, SMALL)], rounds=1, tell=told.append)
    assert told[2:] == found.doubts()


def test_the_command_writes_a_profile_that_simulate_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert main(["calibrate", "--quick", "--output", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["output"] == str(path)
    assert {key: printed[key] for key in ("name", "overlap", "kernel_s")} == {
        key: getattr(load_profile(str(path)), key) for key in ("name", "overlap", "kernel_s")
    }
    assert main(["simulate", "tiny_dense", "--hardware", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] > 0


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--output", str(tmp_path / "nowhere" / "here.json")]) == 2
    assert "measuring" not in capsys.readouterr().err
