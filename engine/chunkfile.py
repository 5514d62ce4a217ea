"""One chunk, one file: written whole or not at all, read only against its checksum.

Space is reserved first, the file is written under a partial name and renamed into place. A full disk leaves nothing
behind and is told with the bytes that were needed and free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from engine.errors import StageFailedError
from engine.run import partial_path
from engine.units import MIB, format_bytes

Array = np.ndarray[Any, np.dtype[Any]]

_VERIFY_BLOCK_BYTES = MIB
# Verifying needs no more memory than this, whatever the chunks.


class StoreFullError(StageFailedError):
    """The disk has no room for a chunk. The run can be resumed once there is."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


def as_bytes(array: Array) -> memoryview:
    """Return the memory of ``array``, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def crc32c(array: Array) -> int:
    return int(google_crc32c.value(array.reshape(-1).view(np.uint8)))


def write_file(root: Path, key: str, array: Array, *, sync: bool) -> None:
    """Put ``array`` at ``root / key``, whole or not at all."""
    path = root / key
    partial = partial_path(path)
    with full_disk_explained(root, array.nbytes, f"chunk {key}"):
        try:
            fd = _open_new(partial)
            try:
                _reserve(fd, array.nbytes)
                rest = as_bytes(array)
                while rest:
                    rest = rest[os.write(fd, rest) :]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _open_new(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:  # the first chunk in this directory
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _reserve(fd: int, nbytes: int) -> None:
    """Have the disk say now, and not after half the chunk, whether there is room."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # then the writes themselves will say
                raise


def read_file(path: Path, array: Array, crc: int) -> str | None:
    """Fill ``array`` from ``path``; return what is wrong with the file, or None."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != array.nbytes:
                return f"is damaged: {path} has {size} bytes, not {array.nbytes}"
            rest = as_bytes(array)
            while rest and (num_read := file.readinto(rest)):
                rest = rest[num_read:]
    except FileNotFoundError:
        return f"is missing: {path}"
    except OSError as error:
        return f"can't be read: {path}: {error.strerror}"
    found = crc32c(array)
    return None if found == crc else f"is damaged: CRC32C of {path} is {found:#010x}, not {crc:#010x}"


@contextlib.contextmanager
def full_disk_explained(root: Path, needed_bytes: int, what: str) -> Iterator[None]:
    """Turn the error of a full disk, or of a used-up quota, into ``StoreFullError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free_bytes = shutil.disk_usage(root if root.exists() else root.parent).free
        raise StoreFullError(
            f"no room for {what}: it needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), the disk of {root} has "
            f"{free_bytes} free ({format_bytes(free_bytes)}): {error.strerror}; make room, then resume the run",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        ) from error


def verify_chunks(root: Path, checksums: Mapping[str, int]) -> list[str]:
    """Return one sentence for each chunk of ``checksums`` under ``root`` that is missing or damaged; changes nothing.

    A process may be running on the store meanwhile.
    """
    sentences = []
    for key, crc in checksums.items():
        try:
            found = 0
            with open(root / key, "rb", buffering=0) as file:
                while block := file.read(_VERIFY_BLOCK_BYTES):
                    found = google_crc32c.extend(found, block)
        except OSError as error:
            sentences.append(f"chunk {key} can't be read: {root / key}: {error.strerror}")
        else:
            if found != crc:
                sentences.append(f"chunk {key} is damaged: CRC32C of {root / key} is {found:#010x}, not {crc:#010x}")
    return sentences
