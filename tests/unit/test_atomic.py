"""Atomic writes: a name that can be seen holds everything it will ever hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.atomic import atomic_directory, atomic_write_bytes, atomic_write_text
from engine.errors import UsageError


def test_text_is_written_whole_as_utf8_over_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    atomic_write_text(path, "first")
    atomic_write_text(path, "zweité\n")
    assert path.read_bytes() == "zweité\n".encode()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "file"
    atomic_write_bytes(path, b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space left"):
        atomic_write_bytes(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}


def test_a_written_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_directory_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "results" / "checkpoint"
    with atomic_directory(path) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "a").write_text("a")
        assert not path.exists()
    assert (path / "sub" / "a").read_text() == "a"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_directory_that_could_not_be_filled_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "checkpoint") as partial:
            (partial / "a").write_text("a")
            raise error

    with pytest.raises(error):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    with pytest.raises(UsageError, match="checkpoint exists already"), atomic_directory(path):
        pytest.fail("must not be entered")
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_replaced_when_asked_and_kept_when_the_new_one_fails(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with atomic_directory(path) as partial:
        (partial / "old").write_text("old")
    with pytest.raises(ValueError, match="half"), atomic_directory(path, replace=True) as partial:
        raise ValueError("half")
    assert [p.name for p in path.iterdir()] == ["old"]
    with atomic_directory(path, replace=True) as partial:
        (partial / "new").write_text("new")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_every_file_is_synced_before_its_directory_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with atomic_directory(tmp_path / "checkpoint") as partial:
        (partial / "a").write_text("a")
        (partial / "b").write_text("b")
    assert sorted(events[:2]) == ["a", "b"]
    assert events[2:] == [partial.name, "rename", tmp_path.name]
