"""The run directory: what a run leaves on disk, and what is no place for one."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.atomic import atomic_write_bytes, partial_path
from engine.errors import RunDirectoryError, UsageError
from engine.journal import Journal
from engine.run import RunDirectory, default_run_path, disk_usage_bytes


def test_a_new_run_directory_is_made_with_its_parents_and_is_empty(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "runs" / "first")
    assert run.path.is_dir()
    assert list(run.path.iterdir()) == []


def test_an_empty_directory_may_become_a_run(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path).path == tmp_path


def test_a_directory_with_something_in_it_is_refused_with_advice_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UsageError) as caught:
        RunDirectory.create(tmp_path)
    assert f"{tmp_path} is not empty (1 entries)" in str(caught.value)
    assert f"`engine resume {tmp_path}`" in str(caught.value)
    assert "name another directory with --run" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_refused_as_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file; name another directory with --run"):
        RunDirectory.create(tmp_path / "file")


def test_a_place_that_is_no_directory_is_refused_as_one_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=rf"can't make run directory .*: {tmp_path}/file is no directory"):
        RunDirectory.check_new(tmp_path / "file" / "run")


@pytest.mark.parametrize(("flags", "why"), [(os.ST_RDONLY, "its file system is read-only"), (0, "no permission")])
def test_a_place_that_can_not_be_written_is_refused_with_its_name_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, why: str
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(UsageError, match=rf"can't make run directory .*/a/run in {tmp_path}: {why}; name another"):
        RunDirectory.check_new(tmp_path / "a" / "run")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc")
def test_a_place_that_only_refuses_when_it_is_written_is_refused_before_any_planning() -> None:
    refusal = r"can't make run directory /proc/x: /proc can't be written \(.*\); name another"
    with pytest.raises(UsageError, match=refusal):
        RunDirectory.check_new(Path("/proc/x"))


def test_looking_whether_a_run_can_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    RunDirectory.check_new(tmp_path)
    RunDirectory.check_new(tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ä" * 128, "a name of 256 bytes, and file systems take 255; name a shorter one with --run"),
        ("a" * 256 + "/run", "a name of 256 bytes, and file systems take 255; name a shorter one with --run"),
        ("/".join(["a" * 200] * 15), r"its path has \d+ bytes, of 3000 at most; name a shorter one with --run"),
    ],
    ids=["name", "parent", "path"],
)
def test_a_name_that_is_too_long_is_refused_and_nothing_is_made(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"can't make run directory .*: {why}$"):
        RunDirectory.create(tmp_path / "new" / name)
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_file_systems_take_is_no_problem(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path / ("a" * 255)).path.is_dir()


def test_what_only_making_the_directory_finds_out_is_an_error_of_usage_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def fail(path: Path, *mode: int) -> None:
        if Path(path).name == "run":
            raise OSError(30, "Read-only file system")
        mkdir(path, *mode)

    monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(UsageError, match=r"can't make run directory .*/run: Read-only file system; mend that"):
        RunDirectory.create(tmp_path / "run")


def test_a_directory_is_a_run_from_the_moment_it_has_a_journal(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"is no run directory: it has no journal\.msgpack"):
        RunDirectory.open(run.path)
    Journal.create(run.journal_path).close()
    assert RunDirectory.open(run.path) == run


def test_opening_a_directory_that_is_not_there_says_how_to_start_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"no run directory at .*gone; start one with `engine execute"):
        RunDirectory.open(tmp_path / "gone")


def test_every_path_of_a_run_lies_in_its_directory_under_the_name_of_the_layout(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path)
    paths = [run.journal_path, run.store_path, run.plan_path, run.results_path]
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == [
        "journal.msgpack",
        "store",
        "plan.py",
        "results",
    ]


@pytest.mark.parametrize(
    ("plan", "name"),
    [("quickstart", "quickstart"), ("plans/qwen2.5_7b.py", "qwen2.5_7b"), ("/tmp/my plan.py", "my plan")],
)
def test_the_default_directory_names_the_plan_and_the_time(plan: str, name: str) -> None:
    now = datetime(2026, 3, 4, 5, 6, 7)
    assert default_run_path(plan, now) == Path(f"runs/{name}-20260304-050607")


def test_links_out_of_the_results_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "big").write_bytes(bytes(1000))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "results" / "file").symlink_to(tmp_path / "outside" / "big")
    assert disk_usage_bytes(tmp_path / "results") == 0


def test_a_sweep_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    assert run.sweep() == []
    atomic_write_bytes(run.results_path / "kept", b"kept")
    atomic_write_bytes(run.plan_path, b"{}")
    left = [partial_path(run.plan_path), partial_path(run.results_path / "checkpoint")]
    left[0].write_text("half")
    left[1].mkdir()
    (left[1] / "a").write_text("half")
    assert sorted(run.sweep()) == sorted(left)
    assert sorted(p.name for p in run.path.rglob("*")) == ["kept", "plan.py", "results"]
