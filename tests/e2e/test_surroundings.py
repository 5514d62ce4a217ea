"""Commands whose surroundings fail them: standard streams that take nothing, signals, run directories that go away.

Each in a process of its own, on a light plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.journal import RunFinished, read_journal
from engine.plan import Stage
from engine.progress import Progress
from tests.e2e.test_cli import LIGHT, ONCE, TINY, engine

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


# Signals


@contextlib.contextmanager
def inside_a_stage(folder: Path, *before: str, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps inside a stage of a run, the first time that the stage is run."""
    hook = "hook=" + ONCE.format(flag=folder / "flag", action=f"time.sleep({seconds})")
    command = [*before, *ENGINE, "execute", "light.py", "--set", hook, "--run", "run"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (folder / "flag").exists() and process.poll() is None:
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,) * 5, (signal.SIGHUP, signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)],
    ids=lambda numbers: "-".join(number.name for number in numbers),
)
def test_signals_that_follow_the_first_one_disturb_nothing(numbers: Sequence[signal.Signals], folder: Path) -> None:
    with inside_a_stage(folder) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.02)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 128 + numbers[0]
    assert told.splitlines()[-1] == (
        f"engine: interrupted by {numbers[0].name}; engine resume run repeats it from its beginning; "
        "what was sampled is kept"
    )
    assert "Traceback" not in told
    assert not list(Path("run").rglob("*.partial"))
    assert engine("resume", "run").code == 0


def test_a_signal_that_a_process_was_started_to_ignore_stays_ignored(folder: Path) -> None:
    with inside_a_stage(folder, "bash", "-c", 'trap "" HUP; exec "$@"', "bash", seconds=0.5) as process:
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert_finished("run")


@pytest.mark.parametrize(
    "command", [["simulate", "slow.py"], ["fit", "slow.py"], ["show", "slow.py"]], ids=lambda command: command[0]
)
def test_every_command_ends_by_a_signal_with_its_code(command: list[str], folder: Path) -> None:
    Path("slow.py").write_text(
        "import time\nfrom pathlib import Path\nfrom engine import Plan\n"
        "def slow() -> Plan:\n    Path('flag').touch()\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([*ENGINE, *command], stderr=subprocess.PIPE, text=True)
    while not (folder / "flag").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (143, "engine: interrupted by SIGTERM\n")


# The run directory


@pytest.mark.parametrize(
    ("run", "why"),
    [("a" * 256, "a name of 256 bytes"), ("new/" + "a" * 256, "a name of 256 bytes"), ("/proc/x", "can't be written")],
    ids=["long", "long in a new folder", "proc"],
)
def test_a_run_directory_that_can_never_be_is_wrong_usage_and_nothing_is_written(
    run: str, why: str, folder: Path
) -> None:
    result = engine("execute", "light.py", "--run", run)
    assert result.code == 2
    assert result.err.startswith(f"engine: error: can't make run directory {run}: ")
    assert why in result.err
    assert [path.name for path in folder.iterdir()] == ["light.py"]


# A Value that leaves for the disk while another stage works; ``hook`` runs in that one.
SPILLING = """
    from pathlib import Path

    from engine import Plan, Stage, TensorSpec, Value


    def spilling(hook: str = "") -> Plan:
        plan = Plan(name="spilling")
        plan.value(Value(name="v", tensors={"t": TensorSpec(shape=(1000,), dtype="float32")}))

        def write(context):
            context.tensors("v")["t"].fill_(3)

        def work(context):
            exec(hook)

        def read(context):
            context.results["loss"] = float(context.tensors("v")["t"].sum())

        plan.add(Stage(name="write", kind="write", run=write, writes=("v",)))
        plan.add(Stage(name="work", kind="work", run=work, workspace_bytes=4000))
        plan.add(Stage(name="read", kind="read", run=read, workspace_bytes=100, reads=("v",)))
        return plan
"""
ON_DISK = ("--budget", "device=5000,host=3000,disk=1MiB")


@pytest.mark.parametrize("action", ["chunk.write_bytes(bytes(4))", "chunk.unlink()"], ids=["damaged", "gone"])
def test_a_chunk_that_is_damaged_says_that_a_resume_makes_it_again_which_it_does(action: str, folder: Path) -> None:
    Path("spilling.py").write_text(textwrap.dedent(SPILLING))
    first = ONCE.format(flag=folder / "flag", action=f"[{action} for chunk in Path('run').rglob('c.0')]")
    result = engine("execute", "spilling.py", "--set", f"hook={first}", *ON_DISK, "--run", "run")
    assert result.code == 4
    assert "chunk (0,) of array 'v/t' is " in result.err
    assert result.err.endswith("; `engine resume run` makes it again\n")
    assert engine("resume", "run", "--json").data()["loss"] == 3000


def moved() -> None:
    os.rename("run", "elsewhere")


def removed() -> None:
    shutil.rmtree("run")


def emptied() -> None:
    removed()
    os.mkdir("run")


def without_journal() -> None:
    os.unlink("run/journal.msgpack")


def replaced() -> None:
    shutil.copyfile("run/journal.msgpack", "copy")
    os.replace("copy", "run/journal.msgpack")


@pytest.mark.parametrize("position", [1, 4, -1], ids=["early", "amid", "in the checkpoint"])
@pytest.mark.parametrize("what", [moved, removed, emptied, without_journal, replaced])
def test_a_run_directory_that_goes_away_ends_the_run_with_exit_4_and_nothing_there_looks_resumable(
    what: Callable[[], None], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage_begins(self: Progress, stage: object, planned_bytes: object) -> None:
        if self._done == position % self._num_stages:
            what()

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "stage_begins", stage_begins)
        result = engine("execute", *TINY, "--run", "run", "--json")
    assert (result.code, result.out) == (4, "")
    assert result.err.splitlines()[-1] == (
        "engine: error: run directory run was moved, removed or emptied while it was run: its journal is not at "
        "run/journal.msgpack any more; if it was moved, resume it where it is now, else execute again"
    )
    assert Path("run").exists() == (what not in (moved, removed))
    assert not list(Path().rglob("*.partial"))
    if what is moved:
        assert engine("resume", "elsewhere").code == 0
    elif what is not replaced:
        assert engine("resume", "run").code == 4


def test_a_run_whose_journal_goes_away_after_its_last_stage_is_not_told_as_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stage_ends(self: Progress, stage: Stage, planned_bytes: object) -> None:
        if stage.name == "report":
            without_journal()

    monkeypatch.setattr(Progress, "stage_ends", stage_ends)
    result = engine("execute", "light.py", "--run", "run", "--json")
    assert (result.code, result.out) == (4, "")
    assert sorted(path.name for path in Path("run").rglob("*") if path.is_file()) == ["plan.py", "sum.bin"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("flag", ["--trace", "--report"])
@pytest.mark.parametrize("command", ["simulate", "execute"])
def test_a_file_in_a_place_that_takes_none_is_told_before_anything_slow(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.commands.find_plan", None)
    result = engine(command, "light.py", flag, "/proc/x")
    assert result.code == 2
    assert result.err.startswith("engine: error: can't write '/proc/x': ")


def test_a_trace_that_can_not_be_written_does_not_hide_why_a_run_failed(folder: Path) -> None:
    (folder / "traces").mkdir()
    hook = "hook=import shutil; shutil.rmtree('traces'); os.symlink('nothing', 'traces'); 1 / 0"
    result = engine("execute", "light.py", "--set", hook, "--trace", "traces/t.json", "--run", "run")
    assert result.code == 5
    assert "note: the trace could not be written: " in result.err
    assert result.err.splitlines()[-1].startswith("engine: error: stage add 2 failed: ZeroDivisionError")


def test_a_trace_that_can_not_be_written_does_not_undo_a_run(folder: Path) -> None:
    (folder / "traces").mkdir()
    hook = "hook=import shutil; shutil.rmtree('traces'); os.symlink('nothing', 'traces')"
    result = engine("execute", "light.py", "--set", hook, "--trace", "traces/t.json", "--run", "run")
    assert result.code == 2
    assert result.err.endswith("; the run is finished, and engine show run prints its results\n")
    assert_finished("run")


@pytest.mark.parametrize("command", [["show", "nothing"], ["simulate", "tiny_dense"], ["execute", "tiny_dense"]])
def test_a_current_folder_that_was_removed_is_told(command: list[str], folder: Path) -> None:
    (folder / "gone").mkdir()
    script = 'cd gone; rmdir ../gone; "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *ENGINE, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "engine: error: the current folder was removed; go to one that is there\n"
