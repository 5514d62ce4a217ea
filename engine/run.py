"""The run directory: what one run leaves on disk.

Layout::

    DIR/journal.msgpack   what was intended and what was done (engine/journal.py); makes DIR a run
    DIR/store/            tensors, zarr v3 (engine/store.py)
    DIR/plan.py           the plan file as it was when the run started
    DIR/trace.json        what happened when, as far as it came (engine/trace.py)
    DIR/results/          checkpoints, gradients and reports that outlive the run

Files and directories appear whole or not at all (`engine.atomic`). What a killed process leaves behind is therefore
only partial names, and ``RunDirectory.sweep`` removes them before a run goes on.

Life cycle: ``create`` makes an empty directory; the first file written into it is the journal. A crash between the
two leaves an empty directory, which ``create`` accepts again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import google_crc32c

from engine.atomic import is_partial, partial_path, remove_tree, sync_directory
from engine.errors import RunDirectoryError, UsageError

METRICS_FILE = "metrics.jsonl"

LONGEST_NAME_BYTES, LONGEST_PATH_BYTES = 255, 3000
# File systems take no longer names, and Linux no path of 4,096 bytes; a run has paths of its own below its directory.


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """The paths of one run. Holds no open file, so it can be made, copied and dropped freely."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make an empty run directory at ``path``, with its parents.

        Raises:
            UsageError: there is something at ``path`` already, and nothing in it was touched; or it can't be made.
        """
        cls.check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent)
        except OSError as error:
            raise UsageError(
                f"can't make run directory {path}: {error.strerror}; mend that, or name another with --run"
            ) from error
        return cls(path=path)

    @classmethod
    def check_new(cls, path: Path) -> None:
        """Say at once, not after minutes of planning, that no run can begin at ``path``; leaves nothing there.

        Raises:
            UsageError: there is something at ``path`` already, it lies in another run, or it can't be written.
        """
        _check_length(path)
        if path.exists() and not path.is_dir():
            raise UsageError(f"run directory {path} is a file; name another directory with --run")
        if path.is_dir() and (num_entries := len(list(path.iterdir()))):
            raise UsageError(
                f"run directory {path} is not empty ({num_entries} entries); "
                f"continue that run with `engine resume {path}`, or name another directory with --run"
            )
        outer = next((parent for parent in path.absolute().parents if (parent / "journal.msgpack").is_file()), None)
        if outer is not None:
            raise UsageError(f"run directory {path} lies inside another run, {outer}; name one outside with --run")
        place = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
        if not place.is_dir():
            raise UsageError(f"can't make run directory {path}: {place} is no directory; name another with --run")
        if not os.access(place, os.W_OK | os.X_OK):
            read_only = os.statvfs(place).f_flag & os.ST_RDONLY
            why = "its file system is read-only" if read_only else "no permission"
            raise UsageError(f"can't make run directory {path} in {place}: {why}; name another with --run")
        try:  # some places tell only so: /proc, or a file system of other users' root
            probe = partial_path(place / "run")
            os.mkdir(probe)
            os.rmdir(probe)
        except OSError as error:
            raise UsageError(
                f"can't make run directory {path}: {place} can't be written ({error.strerror}); name another with --run"
            ) from error

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the run directory at ``path``; reads nothing from it and changes nothing in it.

        Raises:
            RunDirectoryError: ``path`` is not a directory, or has no journal.
        """
        run = cls(path=path)
        if not path.is_dir():
            raise RunDirectoryError(f"no run directory at {path}; start one with `engine execute PLAN --run {path}`")
        if not run.journal_path.is_file():
            raise RunDirectoryError(f"{path} is no run directory: it has no {run.journal_path.name}")
        return run

    @property
    def journal_path(self) -> Path:
        """The journal; a directory is a run from the moment it has one."""
        return self.path / "journal.msgpack"

    @property
    def store_path(self) -> Path:
        """The root group of the zarr store."""
        return self.path / "store"

    @property
    def plan_path(self) -> Path:
        """The copy of the plan file."""
        return self.path / "plan.py"

    @property
    def trace_path(self) -> Path:
        """The trace, predicted and measured."""
        return self.path / "trace.json"

    @property
    def results_path(self) -> Path:
        """The directory of results; made by the first result."""
        return self.path / "results"

    def sweep(self) -> list[Path]:
        """Remove the partial files and directories of a killed process and return what they were.

        Only for the process that continues the run: a live one may be about to rename what this removes.
        """
        inside = sorted(self.results_path.rglob("*")) if self.results_path.is_dir() else []
        removed = [path for path in (*self.path.iterdir(), *inside) if is_partial(path) and not _in_partial(path)]
        for path in removed:
            remove_tree(path)
        return removed

    def clear(self, kept: Mapping[str, Collection[tuple[int, int]]], kept_folders: Collection[str]) -> None:
        """Prepare an unfinished run to begin again: remove what it writes anew, hold what it keeps to its record.

        ``kept`` are the sizes and CRC32Cs that files in the results may have which are not made twice, by path, in the
        order of their making. Where one is gone, those after it go too: they were made from what will be made anew.
        Others in ``kept_folders`` go as well. Other results stay until what replaces them is whole.

        Raises:
            RunDirectoryError: a kept file is not what it was.
        """
        for folder in kept_folders:
            _check_folder(self.results_path / folder)
        for path, expected in kept.items():
            _check_kept(self.results_path / path, expected)
        self.sweep()
        usable = set(takewhile(Path.is_file, (self.results_path / path for path in kept)))
        found = (path for folder in kept_folders for path in (self.results_path / folder).glob("*"))
        uncommitted = [path for path in found if path not in usable]
        for old in (self.store_path, self.trace_path, self.results_path / METRICS_FILE, *uncommitted):
            remove_tree(old)


def _check_length(path: Path) -> None:
    longest = max(path.parts, key=lambda part: len(os.fsencode(part)), default="")
    num_bytes = len(os.fsencode(longest))
    if num_bytes > LONGEST_NAME_BYTES:
        raise UsageError(
            f"can't make run directory {path}: a name of {num_bytes} bytes, and file systems take "
            f"{LONGEST_NAME_BYTES}; name a shorter one with --run"
        )
    num_bytes = len(os.fsencode(path.absolute()))
    if num_bytes > LONGEST_PATH_BYTES:
        raise UsageError(
            f"can't make run directory {path}: its path has {num_bytes} bytes, of {LONGEST_PATH_BYTES} at most; "
            "name a shorter one with --run"
        )


def _check_folder(path: Path) -> None:
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise RunDirectoryError(f"{path} is not the folder that the run made; remove it, and the run makes it again")


def _check_kept(path: Path, expected: Collection[tuple[int, int]]) -> None:
    """Hold a kept file to its record; one that is gone is made again."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise RunDirectoryError(f"{path} is not the file that the run wrote; remove it, and the run makes it again")
    if path.is_file() and data_checksum(path.read_bytes()) not in expected:
        raise RunDirectoryError(
            f"{path} is damaged: it is not the file that the journal says was written; remove it, and the run makes it "
            "again"
        )


def data_checksum(data: bytes) -> tuple[int, int]:
    """Return the size and the CRC32C of some bytes."""
    return len(data), google_crc32c.value(data)


def default_run_path(plan: str, now: datetime) -> Path:
    """Return ``runs/PLAN-YYYYmmdd-HHMMSS``, where PLAN is the name of the plan or of its file without ``.py``."""
    return Path("runs") / f"{Path(plan).name.removesuffix('.py')}-{now:%Y%m%d-%H%M%S}"


def disk_usage_bytes(path: Path) -> int:
    """Return the bytes of all regular files under ``path``, or of the file itself; 0 when there is nothing.

    Links are not followed, so nothing outside ``path`` is counted.
    """
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return sum(disk_usage_bytes(child) for child in path.iterdir())


def _in_partial(path: Path) -> bool:
    return any(is_partial(parent) for parent in path.parents)
