"""The command line as its users meet it: exit codes, one JSON object, nothing half-written, resumed bits.

Commands run in this process through `main`, which is what the console script calls; a process of their own where only
that proves something (imports, signals, a kill).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main
from engine.journal import Journal
from engine.progress import Progress
from tests.limits import files_of_at_most

SMALLER = ("layers=2", "prompt_tokens=130", "group_size=2", "response_tokens=8")
TINY = ["tiny_dense", *(word for setting in SMALLER for word in ("--set", setting))]
TIERS = {"device", "host", "disk"}
SIMULATE_KEYS = {
    "feasible", "budget_bytes", "peak_bytes", "workers", "binding_stage", "smallest_device_bytes", "makespan_s",
    "moved_bytes", "num_stages", "choices",
}  # fmt: skip
EXECUTE_KEYS = SIMULATE_KEYS | {
    "measured_peak_bytes", "wall_s", "loss", "grad_norm", "metrics", "run", "checkpoint", "stages_run",
    "stages_reused",
}  # fmt: skip
CONSOLE_SCRIPT = Path(sys.executable).with_name("engine")

# Five stages on torch alone, a second or two in a process of its own. ``hook`` runs inside the third one.
LIGHT = """
    import os
    import time
    from pathlib import Path

    from engine import Plan, Stage, TensorSpec, Value, ValueKind

    NUMBER = 3


    def light(number: int = NUMBER, hook: str = "") -> Plan:
        plan = Plan(name="light", settings={"number": number})
        spec = TensorSpec(shape=(4, 1000), dtype="float32")
        plan.value(Value(name="sum", tensors={"t": spec}, kind=ValueKind.ACCUMULATOR))

        def add(context, index):
            if index == 2:
                exec(hook)
            context.tensors("sum")["t"].add_(number / (index + 3))

        def report(context):
            numbers = context.tensors("sum")["t"].numpy()
            (context.directory / "sum.bin").write_bytes(numbers.tobytes())
            context.results["loss"] = float(numbers[0, 0])

        for index in range(4):
            run = lambda context, index=index: add(context, index)
            config = {"index": index, "number": number}
            plan.add(Stage(name=f"add {index}", kind="add", run=run, config=config, updates=("sum",)))
        plan.add(Stage(name="report", kind="report", run=report, reads=("sum",)))
        return plan
"""
ONCE = "p = Path('{flag}'); first = not p.exists(); p.touch(); first and {action}"
# A hook that acts when it runs first and not again: the world is another one when the run is resumed.


@dataclass(kw_only=True)
class Result:
    """What a command gave back."""

    code: int
    out: str
    err: str

    def data(self) -> dict[str, Any]:
        """Return the one JSON object that standard output must be."""
        parsed: dict[str, Any] = json.loads(self.out)
        assert isinstance(parsed, dict)
        assert self.out.count("\n") == 1
        return parsed


def engine(*arguments: str | Path) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Result(code=code, out=out.getvalue(), err=err.getvalue())


def contents(folder: Path, under: str = "results") -> dict[str, str]:
    """Return a digest of every file under a folder of a run."""
    root = folder / under
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def assert_integers(sizes: dict[str, Any]) -> None:
    assert sizes.keys() == TIERS
    assert all(type(nbytes) is int for nbytes in sizes.values())


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own, and what loading plans adds to the import path goes again."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "here"


@pytest.fixture
def light(own_folder: Path) -> str:
    """The path of the light plan."""
    path = own_folder / "light.py"
    path.write_text(textwrap.dedent(LIGHT))
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run of the tiny plan: its directory and what it printed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    result = engine("execute", *TINY, "--run", run, "--json")
    assert result.code == 0, result.err
    return run, result.data()


# What every command keeps


def test_help_comes_without_torch() -> None:
    program = """
        import sys
        from engine.__main__ import main
        try:
            main(["--help"])
        finally:
            sys.exit("torch" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("execute", "simulate", "audit", "show", "resume"):
        assert f"\n    {command}" in done.stdout


def test_errors_of_usage_come_without_torch(own_folder: Path) -> None:
    (own_folder / "full").mkdir()
    (own_folder / "full" / "file").touch()
    program = """
        import sys
        from engine.__main__ import main
        for line in sys.argv[1:]:
            code = main(line.split())
            print(code, "torch" in sys.modules, line)
    """
    lines = [
        "simulate nothing",
        "execute nothing",
        "execute nothing --budget device=much",
        "simulate nothing --budget device=much",
        "simulate nothing --hardware abacus",
        "execute nothing --run full",
        "resume nothing",
    ]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *lines],
        capture_output=True, text=True, timeout=60, check=True, cwd=own_folder,
    )  # fmt: skip
    expected = [f"{4 if line.startswith('resume') else 2} False {line}" for line in lines]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["simulate"], ["simulate", "x", "--budg", "device=1"], ["execute", "x", "--no-such-option"]],
)
def test_a_command_line_that_is_none_exits_2_and_writes_nothing(arguments: list[str], own_folder: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        engine(*arguments)
    assert raised.value.code == 2
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "nothing"], "no plan file 'nothing' here, and no shipped plan of that name; shipped are "),
        (["simulate", *TINY, "--budget", "device=8 gigs"], "not a size: '8 gigs'"),
        (["execute", *TINY, "--budget", "device=8 gigs"], "not a size: '8 gigs'"),
        (["simulate", *TINY, "--budget", "gpu=8GiB"], "is not one of device=, host=, disk="),
        (["simulate", *TINY, "--set", "learning"], "--set 'learning': write name=value"),
        (["simulate", *TINY, "--set", "prompt_tokens=1"], "--set prompt_tokens is given twice"),
        (["simulate", *TINY, "--set", "speed=1"], "plan tiny_dense has no such name; it knows family, layers, "),
        (["simulate", *TINY, "--set", "seed=three"], "--set seed='three': not a whole number"),
        (["simulate", *TINY, "--set", "dtype=float8"], "dtype='float8' is not known; choose one of float64, "),
        (["simulate", *TINY, "--set", "loss=magic"], "magic"),
        (["simulate", *TINY, "--hardware", "abacus"], "no hardware profile 'abacus'; known: a100-sxm, cpu, h100-sxm"),
        (["show", "nothing"], "no plan file 'nothing' here"),
    ],
)
def test_wrong_usage_exits_2_with_what_is_wrong_on_standard_error_and_writes_nothing(
    arguments: list[str], message: str, own_folder: Path
) -> None:
    result = engine(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("engine: error: ")
    assert message in result.err
    assert list(own_folder.iterdir()) == []


def test_an_error_in_a_plan_file_exits_2_and_shows_no_traceback(own_folder: Path) -> None:
    (own_folder / "bad.py").write_text("from engine import Plan\ndef bad() -> Plan:\n    raise KeyError('prompt')\n")
    result = engine("simulate", own_folder / "bad.py")
    assert result.code == 2
    assert "KeyError" in result.err
    assert "line 3" in result.err


# simulate


@pytest.mark.parametrize("plan", ["tiny_dense", "tiny_hybrid", "learn_tiny", "calibration", "custom_stage"])
def test_every_shipped_plan_that_needs_no_download_can_be_simulated(plan: str) -> None:
    data = engine("simulate", plan, "--json").data()
    assert data["feasible"] is True
    assert data["num_stages"] > 5


def test_a_model_of_27_billion_parameters_is_simulated_on_a_gpu_without_its_weights() -> None:
    small = [f"--set={name}" for name in ("prompt_tokens=32768", "response_tokens=512", "group_size=2")]
    found = engine("simulate", "qwen3_6_27b", *small, "--hardware", "h20", "--budget", "host=2TB,disk=8TB", "--json")
    data = found.data()
    assert data["feasible"] is True
    assert data["peak_bytes"]["device"] <= data["budget_bytes"]["device"] < 96e9
    assert data["smallest_device_bytes"] > 26.9e9 / 4 * (2 + 4)  # a fourth of the model, with its gradients


def test_simulate_prints_the_keys_of_the_contract_with_integer_bytes_and_seconds(own_folder: Path) -> None:
    data = engine("simulate", *TINY, "--budget", "device=1GiB,host=1GiB", "--json").data()
    assert data.keys() >= SIMULATE_KEYS
    assert data["feasible"] is True
    assert_integers(data["budget_bytes"])
    assert_integers(data["peak_bytes"])
    assert data["budget_bytes"]["device"] == data["budget_bytes"]["host"] == 2**30
    assert all(data["peak_bytes"][tier] <= data["budget_bytes"][tier] for tier in TIERS)
    assert type(data["smallest_device_bytes"]) is int
    assert data["smallest_device_bytes"] <= data["peak_bytes"]["device"]
    assert isinstance(data["makespan_s"], float)
    assert all(type(nbytes) is int for nbytes in data["moved_bytes"].values())
    assert {"chunk_tokens", "branches_at_once"} <= data["choices"].keys()
    (worker,) = data["workers"]
    assert worker.keys() >= {"peak_bytes", "busy_s", "span"}
    assert worker["peak_bytes"] == data["peak_bytes"]
    assert list(own_folder.iterdir()) == []


def test_simulate_says_the_same_in_words() -> None:
    data = engine("simulate", *TINY, "--json").data()
    text = engine("simulate", *TINY).out
    assert "plan tiny_dense: fits" in text
    assert f"({data['smallest_device_bytes']} bytes)" in text
    assert data["binding_stage"] in text


def test_better_hardware_takes_less_time_and_the_same_bytes() -> None:
    slow, fast = (engine("simulate", *TINY, "--hardware", name, "--json").data() for name in ("h100-sxm", "h200-sxm"))
    assert fast["makespan_s"] < slow["makespan_s"]
    assert fast["peak_bytes"] == slow["peak_bytes"]


@pytest.mark.parametrize("command", ["simulate", "execute"])
def test_a_byte_below_the_smallest_budget_exits_3_and_names_the_binding_stage(command: str, own_folder: Path) -> None:
    smallest = engine("simulate", *TINY, "--json").data()["smallest_device_bytes"]
    budget = ["--budget", f"device={smallest - 1}"]
    result = engine(command, *TINY, *budget, "--json")
    data = result.data()
    assert result.code == 3
    assert data["feasible"] is False
    assert data["smallest_device_bytes"] == smallest
    assert_integers(data["budget_bytes"])
    assert data["binding_stage"] in result.err
    assert f"{smallest} bytes" in result.err
    assert f"{smallest - 1} bytes" in result.err
    assert engine(command, *TINY, *budget).out == ""
    assert list(own_folder.iterdir()) == []


# execute


def test_execute_prints_the_keys_of_the_contract(finished: tuple[Path, dict[str, Any]]) -> None:
    run, data = finished
    assert data.keys() >= EXECUTE_KEYS
    assert_integers(data["measured_peak_bytes"])
    assert data["wall_s"] > 0
    assert isinstance(data["loss"], float)
    assert isinstance(data["grad_norm"], float)
    assert data["metrics"]["ratio_max"] == 1.0
    assert data["run"] == str(run)
    assert (data["stages_run"], data["stages_reused"]) == (data["num_stages"], 0)
    assert (Path(data["checkpoint"]) / "model.safetensors").is_file()


def test_measured_peaks_are_the_simulated_ones_to_one_per_cent(finished: tuple[Path, dict[str, Any]]) -> None:
    _, data = finished
    simulated = engine("simulate", *TINY, "--json").data()
    assert data["peak_bytes"] == simulated["peak_bytes"]
    for tier in TIERS:
        assert data["measured_peak_bytes"][tier] == pytest.approx(data["peak_bytes"][tier], rel=0.01), tier


def test_a_run_leaves_no_partial_file_and_no_pickle(finished: tuple[Path, dict[str, Any]]) -> None:
    run, _ = finished
    names = {path.name for path in run.rglob("*") if path.is_file()}
    assert {"journal.msgpack", "plan.py", "metrics.jsonl", "model.safetensors"} <= names
    assert not any(name.endswith((".partial", ".pt", ".pth", ".pkl", ".bin")) for name in names)


def test_exactly_the_smallest_budget_runs_and_is_not_passed(own_folder: Path) -> None:
    smallest = engine("simulate", *TINY, "--json").data()["smallest_device_bytes"]
    data = engine("execute", *TINY, "--budget", f"device={smallest}", "--run", "run", "--json").data()
    assert data["measured_peak_bytes"]["device"] <= data["peak_bytes"]["device"] <= smallest
    assert data["budget_bytes"]["device"] == data["smallest_device_bytes"] == smallest


def test_the_same_plan_gives_the_same_bits_again(finished: tuple[Path, dict[str, Any]]) -> None:
    assert engine("execute", *TINY, "--run", "again").code == 0
    assert contents(Path("again")) == contents(finished[0])


def test_the_closing_text_sets_measured_beside_predicted_and_progress_is_on_standard_error(light: str) -> None:
    result = engine("execute", light, "--run", "run")
    assert "measured / predicted" in result.out
    assert "run: run" in result.out
    assert "report: " not in result.out
    assert "[5/5] report" in result.err


def test_what_a_stage_prints_does_not_mix_with_the_json_object(light: str) -> None:
    result = engine("execute", light, "--set", "hook=print('hello')", "--run", "run", "--json")
    assert result.data()["feasible"] is True


def test_a_run_without_a_name_goes_to_runs_plan_time(light: str, own_folder: Path) -> None:
    data = engine("execute", light, "--json").data()
    (run,) = (own_folder / "runs").iterdir()
    assert Path(data["run"]) == Path("runs") / run.name
    assert run.name.startswith("light-")


def test_a_run_directory_that_is_not_empty_is_refused_with_advice_and_left_alone(light: str, own_folder: Path) -> None:
    (own_folder / "run").mkdir()
    (own_folder / "run" / "mine").write_text("precious")
    result = engine("execute", light, "--run", "run")
    assert result.code == 2
    assert "engine resume run" in result.err
    assert "another" in result.err
    assert [path.name for path in (own_folder / "run").iterdir()] == ["mine"]


def test_a_run_directory_that_can_not_be_made_exits_2_before_any_planning(
    light: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("engine.commands.find_plan", None)
    result = engine("execute", light, "--run", "new/run")
    assert result.code == 2
    assert f"can't make run directory new/run in {own_folder}: no permission; name another with --run" in result.err
    assert [path.name for path in own_folder.iterdir()] == ["light.py"]


@pytest.mark.parametrize("command", [["execute", "light.py", "--run", "run"], ["resume", "run"]])
def test_a_live_run_is_left_alone_and_that_is_told_before_any_planning(
    command: list[str], light: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "run").mkdir()
    with Journal.create(own_folder / "run" / "journal.msgpack"):
        monkeypatch.setattr("engine.commands.find_plan", None)
        result = engine(*command)
    assert result.code == 2
    assert "another process is running" in result.err


def test_a_disk_with_less_room_than_the_budget_is_noted_before_the_run_starts(light: str) -> None:
    result = engine("execute", light, "--run", "run", "--budget", "disk=1000TiB")
    assert result.code == 0
    note = next(line for line in result.err.splitlines() if line.startswith("note: the budget has 1000"))
    assert re.search(r"TiB of disk, but the disk of .* has only [\d.]+ \wiB free", note)
    assert result.err.index(note) < result.err.index("[1/5]")
    assert "note:" not in engine("execute", light, "--run", "other", "--budget", "disk=1KiB").err


def test_a_full_disk_names_the_checkpoint_and_the_bytes_and_the_run_can_go_on(
    finished: tuple[Path, dict[str, Any]], own_folder: Path
) -> None:
    with files_of_at_most(100_000):
        result = engine("execute", *TINY, "--run", "run")
    assert result.code == 5
    assert "no room for the checkpoint run/results/checkpoint: it needs " in result.err
    assert "may have 100000 at most" in result.err
    assert "; allow longer files (ulimit -f), then resume the run" in result.err
    assert not list((own_folder / "run").rglob("*.partial"))
    assert engine("resume", "run").code == 0
    assert contents(own_folder / "run", "results/checkpoint") == contents(finished[0], "results/checkpoint")


def test_a_disk_error_of_a_persons_own_stage_says_what_helps(light: str) -> None:
    hook = "hook=raise OSError(28, 'No space left on device', 'mine.bin')"
    result = engine("execute", light, "--set", hook, "--run", "run")
    assert result.code == 5
    told = "stage add 2 failed: OSError: [Errno 28] No space left on device: 'mine.bin'; make room, then resume the run"
    assert told in result.err


def test_an_empty_run_directory_is_taken(light: str, own_folder: Path) -> None:
    (own_folder / "run").mkdir()
    assert engine("execute", light, "--run", "run").code == 0


def test_gradients_are_written_where_they_were_asked_for(own_folder: Path) -> None:
    from safetensors.numpy import load_file

    assert engine("execute", *TINY, "--run", "run", "--save-gradients", "g.safetensors").code == 0
    gradients = load_file("g.safetensors")
    assert "model.embed_tokens.weight" in gradients
    assert all(array.any() for array in gradients.values())
    assert sorted(path.name for path in own_folder.iterdir()) == ["g.safetensors", "run"]


@pytest.mark.parametrize("plan", ["tiny", "light"])
def test_gradients_that_can_not_be_written_are_refused_before_anything_is(
    plan: str, light: str, own_folder: Path
) -> None:
    name, target = (TINY, "no/such/g.safetensors") if plan == "tiny" else ([light], "g.safetensors")
    result = engine("execute", *name, "--run", "run", "--save-gradients", target)
    assert result.code == 2
    assert ("its folder does not exist" if plan == "tiny" else "can't save gradients") in result.err
    assert [path.name for path in own_folder.iterdir()] == ["light.py"]


def test_a_failed_stage_exits_5_with_its_name_and_the_run_can_go_on(light: str, own_folder: Path) -> None:
    hook = "hook=" + ONCE.format(flag=own_folder / "flag", action="1 / 0")
    result = engine("execute", light, "--set", hook, "--run", "run", "--json")
    assert (result.code, result.out) == (5, "")
    assert "stage add 2 failed: ZeroDivisionError" in result.err
    assert not list((own_folder / "run").rglob("*.partial"))
    assert engine("execute", light, "--run", "whole").code == 0
    assert engine("resume", "run").code == 0
    assert contents(Path("run"))["sum.bin"] == contents(Path("whole"))["sum.bin"]


def test_a_stage_that_passes_its_planned_bytes_exits_5_with_both_figures(light: str) -> None:
    hook = "hook=import torch; big = torch.zeros(1000)"
    result = engine("execute", light, "--set", hook, "--run", "run")
    assert result.code == 5
    assert "stage add 2 used" in result.err
    assert "(20000 bytes) of the device" in result.err
    assert "(16000 bytes) planned for it" in result.err


# audit


def test_audit_in_float64_is_within_its_tolerance() -> None:
    result = engine("audit", *TINY, "--set", "dtype=float64", "--json")
    data = result.data()
    assert result.code == 0
    assert data["max_rel_err"] <= 1e-10
    assert data["l2_rel_err"] <= 1e-10
    assert data["cosine"] == pytest.approx(1.0)
    assert data["dtype"] == "float64"
    assert 0 < data["stop_prompt"]["cosine"] < 1
    assert data["stop_prompt"]["l2_rel_err"] > 0.01


def test_an_audit_out_of_tolerance_exits_1_and_prints_its_object(own_folder: Path) -> None:
    text = """
        from engine import Plan

        def off() -> Plan:
            report = {
                "passed": False, "tolerance": 1e-10, "max_rel_err": 0.5, "l2_rel_err": 0.5, "cosine": 0.9,
                "dtype": "float64", "stop_prompt": {"cosine": 0.8, "l2_rel_err": 0.6},
            }
            return Plan(name="off", hooks={"audit": lambda budget: report})
    """
    (own_folder / "off.py").write_text(textwrap.dedent(text))
    result = engine("audit", "off.py", "--json")
    assert result.code == 1
    assert result.data()["max_rel_err"] == 0.5


def test_a_plan_without_audit_says_so(light: str) -> None:
    result = engine("audit", light)
    assert result.code == 2
    assert "plan 'light' can't be audited" in result.err


# show


def test_show_prints_the_stages_of_a_plan_and_what_ties_them(light: str) -> None:
    data = engine("show", light, "--json").data()
    names = [*(f"add {index}" for index in range(4)), "report"]
    assert (data["plan"], data["stages"]) == ("light", names)
    assert data["edges"] == [list(pair) for pair in itertools.pairwise(names)]
    assert all(name in engine("show", light).out for name in names)


def test_show_prints_what_a_finished_run_holds(finished: tuple[Path, dict[str, Any]]) -> None:
    run, executed = finished
    data = engine("show", run, "--json").data()
    assert data["plan"] == "tiny_dense"
    assert data["finished"] is True
    assert data["stages_committed"] == executed["num_stages"]
    assert data["results"]["loss"] == executed["loss"]
    assert "finished" in engine("show", run).out


def test_show_of_a_directory_that_is_no_run_exits_4(own_folder: Path) -> None:
    (own_folder / "empty").mkdir()
    result = engine("show", "empty")
    assert result.code == 4
    assert "no run directory" in result.err


def test_a_damaged_journal_exits_4_for_show_and_resume_and_is_left_as_it_is(light: str) -> None:
    assert engine("execute", light, "--run", "run").code == 0
    journal = Path("run/journal.msgpack")
    damaged = bytearray(journal.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    journal.write_bytes(damaged)
    for command in ("show", "resume"):
        assert engine(command, "run").code == 4
    assert journal.read_bytes() == damaged


# resume


class Crash(BaseException):
    """Stands for the end of the process: nothing in the engine expects it."""


def crash_after(monkeypatch: pytest.MonkeyPatch, num_stages: int) -> None:
    def stage_ends(self: Progress, stage: object, planned_bytes: object) -> None:
        self._done += 1
        if self._done == num_stages:
            raise Crash

    monkeypatch.setattr(Progress, "stage_ends", stage_ends)


def crashed_run(arguments: Sequence[str], num_stages: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, num_stages)
        with pytest.raises(Crash):
            engine("execute", *arguments, "--run", "run")
    return Path("run")


@pytest.mark.parametrize("num_stages", [1, 5, 9])
def test_a_run_that_ended_anywhere_resumes_to_the_bits_of_an_uninterrupted_one(
    num_stages: int, finished: tuple[Path, dict[str, Any]]
) -> None:
    run = crashed_run(TINY, num_stages)
    assert "not finished" in engine("show", run).out
    result = engine("resume", run, "--json")
    data = result.data()
    assert result.code == 0
    assert data.keys() >= EXECUTE_KEYS
    assert contents(run) == contents(finished[0])
    assert (data["loss"], data["grad_norm"]) == (finished[1]["loss"], finished[1]["grad_norm"])
    assert data["measured_peak_bytes"] == finished[1]["measured_peak_bytes"]


def test_show_counts_every_stage_of_a_resumed_run_once(light: str) -> None:
    crashed_run([light], 3)
    assert engine("resume", "run").code == 0
    data = engine("show", "run", "--json").data()
    assert (data["finished"], data["stages_committed"]) == (True, 5)


def test_a_resumed_run_writes_the_gradients_that_were_asked_for() -> None:
    crashed_run([*TINY, "--save-gradients", "g.safetensors"], 3)
    assert engine("resume", "run").code == 0
    assert Path("g.safetensors").is_file()


def test_a_resumed_run_keeps_its_budget_and_choices() -> None:
    smallest = engine("simulate", *TINY, "--json").data()["smallest_device_bytes"]
    budget = ["--budget", f"device={smallest},host=1GiB,disk=1GiB"]
    whole = engine("execute", *TINY, *budget, "--run", "whole", "--json").data()
    crashed_run([*TINY, *budget], 5)
    data = engine("resume", "run", "--json").data()
    same = ("budget_bytes", "choices", "peak_bytes", "measured_peak_bytes", "loss", "grad_norm", "stages_run")
    assert {key: data[key] for key in same} == {key: whole[key] for key in same}
    assert contents(Path("run")) == contents(Path("whole"))


def test_a_run_is_resumed_from_another_folder(
    light: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crashed_run(["light.py"], 2)
    monkeypatch.chdir(tmp_path)
    assert engine("resume", "here/run").code == 0
    assert (own_folder / "run" / "results" / "sum.bin").is_file()


def test_a_run_whose_plan_file_is_gone_is_resumed_from_its_copy(light: str) -> None:
    crashed_run([light], 2)
    Path(light).unlink()
    assert engine("resume", "run").code == 0


def test_a_finished_run_is_not_run_again(light: str) -> None:
    assert engine("execute", light, "--run", "run").code == 0
    before = contents(Path("run"), ".")
    result = engine("resume", "run")
    assert result.code == 2
    assert "is finished; engine show" in result.err
    assert contents(Path("run"), ".") == before


def test_a_changed_plan_file_is_refused_with_exit_4_and_what_differs(light: str) -> None:
    crashed_run([light], 2)
    before = contents(Path("run"), ".")
    Path(light).write_text(Path(light).read_text().replace("NUMBER = 3", "NUMBER = 4"))
    result = engine("resume", "run")
    assert result.code == 4
    assert "the plan is not the one that the run was started with: number differ" in result.err
    assert contents(Path("run"), ".") == before


def test_a_plan_file_with_another_comment_is_the_same_plan(light: str) -> None:
    crashed_run([light], 2)
    Path(light).write_text("# a remark\n" + Path(light).read_text())
    assert engine("resume", "run").code == 0


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_what_is_no_run_can_not_be_resumed(name: str, own_folder: Path) -> None:
    (own_folder / "empty").mkdir()
    assert engine("resume", name).code == 4


def test_what_a_killed_process_left_half_written_goes_when_it_is_resumed(light: str) -> None:
    run = crashed_run([light], 2)
    (run / "results" / ".sum.bin.0123abcd.partial").write_bytes(b"half")
    assert engine("resume", run).code == 0
    assert not list(run.rglob("*.partial"))


# Signals


def test_an_interruption_exits_130_and_the_run_can_go_on(light: str, own_folder: Path) -> None:
    hook = "hook=" + ONCE.format(flag=own_folder / "flag", action="(_ for _ in ()).throw(KeyboardInterrupt)")
    result = engine("execute", light, "--set", hook, "--run", "run")
    assert result.code == 130
    assert "engine resume" in result.err
    assert engine("resume", "run").code == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_process_ended_by_a_signal_inside_a_stage_resumes_to_the_same_bits(
    number: signal.Signals, code: int, light: str, own_folder: Path
) -> None:
    flag = own_folder / "flag"
    hook = "hook=" + ONCE.format(flag=flag, action="time.sleep(60)")
    process = subprocess.Popen(
        [CONSOLE_SCRIPT, "execute", light, "--set", hook, "--run", "run"], stderr=subprocess.DEVNULL
    )
    try:
        while not flag.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=30) == code
    finally:
        process.kill()
        process.wait()
    assert engine("resume", "run").code == 0
    assert engine("execute", light, "--run", "whole").code == 0
    assert contents(Path("run"))["sum.bin"] == contents(Path("whole"))["sum.bin"]


# Import path


@pytest.mark.parametrize("command", [[CONSOLE_SCRIPT], [sys.executable, "-m", "engine"]], ids=["script", "module"])
def test_folders_named_as_ours_beside_a_plan_do_not_shadow_ours(command: list[str | Path], own_folder: Path) -> None:
    for name in ("models", "stages", "plans"):
        (own_folder / name).mkdir()
        (own_folder / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    text = """
        from importlib.util import find_spec

        import engine
        from engine import Plan, Stage

        places = {name: find_spec(name).origin for name in ("engine", "models", "stages", "plans")}

        def mine() -> Plan:
            plan = Plan(name=str(places))
            plan.add(Stage(name="s", kind="s", run=print))
            return plan
    """
    (own_folder / "mine.py").write_text(textwrap.dedent(text))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "show", "mine.py", "--json"],
        capture_output=True, text=True, timeout=120, check=False, cwd=own_folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(own_folder) not in json.loads(done.stdout)["plan"]
