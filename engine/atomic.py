"""Files and directories that appear whole or not at all.

Invariant: a name that a reader can see holds everything it will ever hold. What is written is built under a hidden
``.NAME.*.partial`` beside its place, synced, and renamed. What a killed process leaves behind is therefore only such
partial names. The folder of what is written is made where it is missing, those above it are not: a run directory that
was removed meanwhile does not come back for a file of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import UsageError

PARTIAL_SUFFIX = ".partial"
LONGEST_NAME_BYTES = 200
# File systems take 255; what a file is called until it is whole is longer than its name.


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
    probe = partial_path(Path(path).absolute())
    try:  # some places tell only so, as /proc
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(probe)
    except OSError as error:
        raise UsageError(f"can't write {path!r}: {error.strerror}; name another place") from error


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
    path.parent.mkdir(exist_ok=True)
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
    path.parent.mkdir(exist_ok=True)
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
    remove_tree(old)


def remove_tree(path: Path) -> None:
    """Remove what is at ``path``, if there is anything; a link is removed and not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
