"""Commands whose surroundings fail them: standard streams that take nothing, signals, run directories that go away.

Each in a process of its own, on a light plan.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engine.journal import RunFinished, read_journal
from tests.e2e.test_cli import LIGHT, engine

ENGINE = (sys.executable, "-m", "engine")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own, which has the light plan."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("light.py").write_text(textwrap.dedent(LIGHT))
    return tmp_path / "here"


def engine_with(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does that is told so."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *ENGINE, *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def assert_finished(run: str) -> None:
    records, _ = read_journal(Path(run) / "journal.msgpack")
    assert isinstance(records[-1], RunFinished)
    assert (Path(run) / "results" / "sum.bin").is_file()


# Standard streams


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "<&- >&-"])
def test_a_result_that_can_not_be_written_exits_2_and_the_run_is_finished(redirection: str, as_json: list[str]) -> None:
    done = engine_with(redirection, "execute", "light.py", "--run", "run", *as_json)
    (told,) = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert done.returncode == 2
    assert told.startswith("engine: error: the result can't be written to standard output: ")
    assert told.endswith("; the run is finished, and engine show run prints its results")
    assert_finished("run")


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_progress_that_can_not_be_written_is_lost_and_the_run_goes_on(redirection: str, as_json: list[str]) -> None:
    hook = "hook=import sys; print('x' * 100000, file=sys.stderr)"
    done = engine_with(redirection, "execute", "light.py", "--set", hook, "--run", "run", *as_json)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["run"] == "run" if as_json else "run: run" in done.stdout
    assert_finished("run")


def test_what_a_stage_prints_to_a_reader_that_went_away_does_not_stop_the_run() -> None:
    hook = "hook=print('x' * 100000, flush=True)"
    done = engine_with("> >(true)", "execute", "light.py", "--set", hook, "--run", "run")
    assert done.returncode == 141
    assert all(line.startswith("[") for line in done.stderr.splitlines())
    assert_finished("run")


@pytest.mark.parametrize("command", [["show", "light.py"], ["show", "light.py", "--json"], ["--help"]])
def test_a_reader_that_went_away_ends_a_command_quietly(command: list[str]) -> None:
    done = engine_with("> >(true)", *command)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "> >(true)"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["simulate", "light.py", "--budget", "device=1", "--json"], 3),
        (["fit", "light.py", "--vary", "number", "--budget", "device=1", "--json"], 3),
        (["execute", "light.py", "--run", "run", "--set", "hook=1 / 0", "--json"], 5),
        (["show", "nothing"], 2),
    ],
    ids=["simulate", "fit", "execute", "show"],
)
def test_a_code_that_tells_something_stays_where_nothing_can_be_written(
    command: list[str], code: int, redirection: str
) -> None:
    done = engine_with(redirection, *command)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["simulate", "light.py"], ["fit", "light.py"], ["show", "light.py"], ["--help"]])
def test_every_command_says_that_its_result_can_not_be_written(command: list[str]) -> None:
    done = engine_with(">/dev/full", *command)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "engine: error: the result can't be written to standard output: No space left on device; send it elsewhere"
    )


def test_a_journal_never_gets_the_number_of_a_stream_that_was_closed() -> None:
    hook = "hook=os.write(1, b'out'); os.write(2, b'err')"
    done = engine_with(">&- 2>&-", "execute", "light.py", "--set", hook, "--run", "run")
    assert done.returncode == 5  # to write there fails, as it does without us
    assert engine("show", "run", "--json").data()["stages_committed"] == 2
