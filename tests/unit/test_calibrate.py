"""Calibration: a short one, whose figures are rough, but are figures of this machine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.calibrate import MEASURED, PLAN, calibrate
from engine.hardware import load_profile
from engine.loader import find_plan

SMALL = {"prompt_tokens": "200", "chunk_tokens": "64", "response_tokens": "8", "group_size": "2"}


@pytest.mark.parametrize("settings", [*MEASURED, {}], ids=str)
def test_every_plan_that_is_measured_can_be_built(settings: dict[str, str]) -> None:
    assert find_plan(PLAN).plan(settings).stages


def test_a_measured_profile_can_be_loaded_and_fits_the_stages_it_is_of(tmp_path: Path) -> None:
    told: list[str] = []
    found = calibrate("mine", [partial(find_plan(PLAN).plan, SMALL)], rounds=2, tell=told.append)
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
