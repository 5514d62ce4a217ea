"""The run directory: what one run leaves on disk, and the ways to put a file there whole or not at all.

Layout::

    DIR/journal.msgpack   what was intended and what was done (engine/journal.py); makes DIR a run
    DIR/store/            tensors, zarr v3 (engine/store.py)
    DIR/plan.py           the plan file as it was when the run started
    DIR/trace.json        what happened when, as far as it came (engine/trace.py)
    DIR/results/          checkpoints, gradients and reports that outlive the run

Invariant: a name that a reader can see holds everything it will ever hold. Files and directories are built under
a hidden ``.NAME.*.partial`` beside their place, synced, and renamed. What a killed process leaves behind is
therefore only such partial names, and ``RunDirectory.sweep`` removes them before a run goes on.

Life cycle: ``create`` makes an empty directory; the first file written into it is the journal. A crash between the
two leaves an empty directory, which ``create`` accepts again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path

import google_crc32c

from engine.errors import RunDirectoryError, UsageError

METRICS_FILE = "metrics.jsonl"
PARTIAL_SUFFIX = ".partial"
LONGEST_NAME_BYTES = 200
# File systems take 255; what a file is called until it is whole is longer than its name.


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
        """Say at once, not after minutes of planning, that no run can begin at ``path``; changes nothing.

        Raises:
            UsageError: there is something at ``path`` already, it lies in another run, or it can't be written.
        """
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
            _remove_tree(path)
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
            _remove_tree(old)


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


def check_writable(path: str) -> None:
    """Say at once, not at the end of a run, that a file asked for can't be written.

    Raises:
        UsageError: its folder does not exist or may not be written, its name is too long, or something that is no
            regular file is there (a link would be replaced, not followed).
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise UsageError(f"can't write {path!r}: its folder does not exist; create it first")
    if len(os.fsencode(Path(path).name)) > LONGEST_NAME_BYTES:
        raise UsageError(f"can't write {path!r}: a name of more than {LONGEST_NAME_BYTES} bytes; give a shorter one")
    exists = os.path.lexists(path)
    if not Path(path).name or path.endswith("/") or (exists and (Path(path).is_symlink() or not Path(path).is_file())):
        raise UsageError(f"can't write {path!r}: it is no regular file; name one, or one that is not there yet")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"can't write {path!r}: no permission to write in its folder; name another place")


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all; see ``atomic_write_bytes``."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` and sync it; whatever was there stays until the new file is complete.

    Raises:
        OSError: the file could not be written; ``path`` is as it was, and nothing is left beside it.
    """
    with atomic_file(path) as partial, open(partial, "xb") as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write a file at; sync it and rename it to ``path`` at the end, or remove it on any error.

    Raises:
        OSError: the file could not be written; ``path`` is as it was, and nothing is left beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextlib.contextmanager
def atomic_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill; sync it and rename it to ``path`` at the end, or remove it on any error.

    With ``replace``, what is at ``path`` goes away once the new directory is complete. The two renames of that
    are not one step: a crash between them leaves neither, so replace only what can be made again.

    Raises:
        UsageError: there is something at ``path`` and ``replace`` is false; nothing was touched.
        OSError: the directory could not be written; nothing is left of it.
    """
    if not replace and os.path.lexists(path):
        raise UsageError(f"{path} exists already; remove it or name another place")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    partial.mkdir()
    try:
        yield partial
        _sync_tree(partial)
        _move_into_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(path.parent)


def disk_usage_bytes(path: Path) -> int:
    """Return the bytes of all regular files under ``path``, or of the file itself; 0 when there is nothing.

    Links are not followed, so nothing outside ``path`` is counted.
    """
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return sum(disk_usage_bytes(child) for child in path.iterdir())


def sync_directory(path: Path) -> None:
    """Make the names in directory ``path`` durable; a renamed file can vanish in a power cut without this."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def partial_path(path: Path) -> Path:
    """Return a fresh hidden name beside ``path``, on the same file system, for what will be renamed to it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def is_partial(path: Path) -> bool:
    """Return whether ``path`` has a name that ``partial_path`` gives."""
    return path.name.startswith(".") and path.name.endswith(PARTIAL_SUFFIX)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            with open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def _in_partial(path: Path) -> bool:
    return any(is_partial(parent) for parent in path.parents)


def _move_into_place(partial: Path, path: Path) -> None:
    if not os.path.lexists(path):
        os.rename(partial, path)
        return
    old = partial_path(path)
    os.rename(path, old)
    try:
        os.rename(partial, path)
    except BaseException:
        os.rename(old, path)
        raise
    _remove_tree(old)


def _remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
