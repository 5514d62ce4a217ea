"""``engine fit`` as its users meet it: the table, one JSON object, exit codes, and that what it says fits does."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main

SETTINGS = ("layers=2", "prompt_tokens=200", "chunk_tokens=256", "branches_at_once=1", "head_rows=64")
SMALL = ["tiny_dense", *(word for item in SETTINGS for word in ("--set", item))]
TIGHT = "device=3MiB,host=1MiB,disk=1MiB"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def engine(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


def fit(*arguments: str) -> dict[str, Any]:
    code, out, err = engine("fit", *SMALL, *arguments, "--json")
    assert code == 0, err
    assert out.count("\n") == 1
    data: dict[str, Any] = json.loads(out)
    return data


def simulate(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = engine("simulate", *SMALL, *arguments, "--json")
    return code, json.loads(out)


@pytest.mark.slow
def test_the_longest_prompt_fits_and_a_hundredth_more_does_not() -> None:
    data = fit("--vary", "prompt_tokens", "--budget", TIGHT)
    found = data["vary"]["prompt_tokens"]
    assert (data["plan"], data["feasible"]) == ("tiny_dense", True)
    assert data["budget_bytes"] == {"device": 3 * 2**20, "host": 2**20, "disk": 2**20}
    assert found["value"] < found["next_value"] <= found["value"] * 1.01
    assert found["limit"].startswith(f"at prompt_tokens={found['next_value']}: ")
    for value, expected in ((found["value"], 0), (found["next_value"], 3)):
        settings = [f"prompt_tokens={value}" if word.startswith("prompt_tokens") else word for word in SMALL]
        code, out, _ = engine("simulate", *settings, "--budget", TIGHT, "--json")
        assert code == expected
        if code == 0:
            simulated = json.loads(out)
            assert simulated["makespan_s"] <= found["makespan_s"]
            assert simulated["choices"].keys() == found["choices"].keys()
            assert found["peak_bytes"]["device"] <= 3 * 2**20


def test_the_smallest_device_budget_is_that_of_the_simulation_and_is_enough() -> None:
    room = "host=1GiB,disk=1GiB"
    found = fit("--vary", "device", "--budget", room)["vary"]["device"]
    code, simulated = simulate("--budget", f"device={found['value']},{room}")
    assert (code, simulated["smallest_device_bytes"]) == (0, found["value"])
    assert simulate("--budget", f"device={found['value'] - 1},{room}")[0] == 3


LIGHT = """
from engine import Plan, Stage, TensorSpec, Value
from engine.errors import UsageError

def light(group_size: int = 4) -> Plan:
    if group_size > 50:
        raise UsageError("there are 50 answers and no more")
    plan = Plan(name="light")
    plan.value(Value(name="answers", tensors={"t": TensorSpec(shape=(group_size, 1000), dtype="uint8")}))
    plan.add(Stage(name="write", kind="write", run=print, writes=("answers",)))
    return plan
"""


def test_without_names_the_usual_ones_are_answered_in_a_table() -> None:
    Path("light.py").write_text(LIGHT)
    code, out, err = engine("fit", "light.py", "--budget", "device=1MiB")
    assert code == 0, err
    rows = [line.split()[:2] for line in out.splitlines()[2:6]]
    assert rows == [["largest", "group_size"], ["smallest", "device"], ["smallest", "host"], ["smallest", "disk"]]
    assert "group_size: at group_size=51: there are 50 answers and no more" in out
    assert "group_size 8: fits" in err


def test_where_nothing_fits_the_object_comes_with_exit_code_3() -> None:
    code, out, _ = engine("fit", *SMALL, "--vary", "device", "--budget", "disk=1KiB", "--json")
    data = json.loads(out)
    assert (code, data["feasible"], data["vary"]["device"]["value"]) == (3, False, None)


@pytest.mark.parametrize("name", ["gradient", "nonsense"])
def test_a_name_that_can_not_be_varied_is_wrong_usage(name: str) -> None:
    code, out, err = engine("fit", *SMALL, "--vary", name)
    assert (code, out) == (2, "")
    assert f"--vary {name}: " in err
    assert "prompt_tokens" in err
