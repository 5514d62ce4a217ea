"""One chunk, one file, read only against its checksum.

A new chunk's space is reserved before its first byte, unless one write brings all of it and says as much itself. A
chunk that is replaced is overwritten where it lies: that takes no room, and no second file that would have to be
renamed. So a process that is killed can leave half a chunk,
new or replaced; it never passes for a whole one, since its checksum is not the one in the journal. An error while
writing removes the file. A full disk is told with the bytes that were needed and free (`engine.full_disk`).

The checksum is taken block by block while the block is still in the processor's cache, and lets other threads run in
between: the library that computes it holds the interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from engine.full_disk import full_disk_explained
from engine.units import MIB

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_BYTES = MIB
# What is read or written between two updates of the checksum: small enough for the cache, and verifying needs no more
# memory than this; large enough that the calls cost nothing (a 1 MiB block takes over 100 us).

SYNCED_AT_ONCE = 16
# Enough to keep a disk busy; a process may have a thousand files open.


def as_bytes(array: Array) -> memoryview:
    """Return the memory of ``array``, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def write_file(root: Path, key: str, array: Array, *, replace: bool) -> int:
    """Put ``array`` at ``root / key`` and return its CRC32C; after an error there is no such file.

    Raises:
        StoreFullError: the disk has no room.
        FileExistsError: there is a file, and it is not to be replaced.
    """
    path = f"{root}/{key}"
    with full_disk_explained(root, array.nbytes, f"chunk {key}"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | (0 if replace else os.O_EXCL), 0o666)
        try:
            try:
                if not replace and array.nbytes > BLOCK_BYTES:
                    _reserve(fd, array.nbytes)
                crc = _write_blocks(fd, array.reshape(-1).view(np.uint8))
            finally:
                os.close(fd)
        except BaseException:
            os.unlink(path)
            raise
    return crc


def _reserve(fd: int, nbytes: int) -> None:
    """Have the disk say now, and not after half the chunk, whether there is room."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # then the writes themselves will say
                raise


def _write_blocks(fd: int, data: Array) -> int:
    """Write all bytes of ``data``, uint8, and return their CRC32C."""
    crc = 0
    for start in range(0, data.size, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        rest = block.data
        while rest:
            rest = rest[os.write(fd, rest) :]
        crc = google_crc32c.extend(crc, block)
    return crc


def sync_files(paths: Sequence[str]) -> None:
    """Make durable what files hold. The disk is given several at a time, so that it does not wait between them."""
    for start in range(0, len(paths), SYNCED_AT_ONCE):
        with contextlib.ExitStack() as opened:
            fds = []
            for path in paths[start : start + SYNCED_AT_ONCE]:
                fds.append(os.open(path, os.O_RDONLY))
                opened.callback(os.close, fds[-1])
                _begin_writing(fds[-1])
            for fd in fds:
                os.fdatasync(fd)


def _begin_writing(fd: int) -> None:
    """Have what the page cache holds of a file go to the disk, without waiting for it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # Linux begins to write what it can't forget yet


def read_file(path: str, array: Array, crc: int) -> str | None:
    """Fill ``array`` from ``path``; return what is wrong with the file, or None."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size != array.nbytes:
                return f"is damaged: {path} has {size} bytes, not {array.nbytes}"
            found = _read_blocks(fd, array.reshape(-1).view(np.uint8))
        finally:
            os.close(fd)
    except FileNotFoundError:
        return f"is missing: {path}"
    except OSError as error:
        return f"can't be read: {path}: {error.strerror}"
    return None if found == crc else f"is damaged: CRC32C of {path} is {found:#010x}, not {crc:#010x}"


def _read_blocks(fd: int, data: Array) -> int:
    """Fill ``data``, uint8, and return the CRC32C of its bytes."""
    crc = 0
    for start in range(0, data.size, BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        rest = block.data
        while rest and (num_read := os.readv(fd, [rest])):
            rest = rest[num_read:]
        crc = google_crc32c.extend(crc, block)
    return crc


def verify_chunks(root: Path, checksums: Mapping[str, int]) -> list[str]:
    """Return one sentence for each chunk of ``checksums`` under ``root`` that is missing or damaged; changes nothing.

    A process may be running on the store meanwhile.
    """
    sentences = []
    for key, crc in checksums.items():
        try:
            found = 0
            with open(root / key, "rb", buffering=0) as file:
                while block := file.read(BLOCK_BYTES):
                    found = google_crc32c.extend(found, block)
        except OSError as error:
            sentences.append(f"chunk {key} can't be read: {root / key}: {error.strerror}")
        else:
            if found != crc:
                sentences.append(f"chunk {key} is damaged: CRC32C of {root / key} is {found:#010x}, not {crc:#010x}")
    return sentences
