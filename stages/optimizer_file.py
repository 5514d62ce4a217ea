"""The optimizer's state as one safetensors file beside a checkpoint.

Tensors ``exp_avg.NAME``, ``exp_avg_sq.NAME`` and, where weights alone would lose bits, ``master.NAME``: shaped like
the parameters, in the accumulation dtype. Metadata: the format and its version, the number of updates done, the dtype
of the checkpoint that was written with it, and a CRC32C for each kind of tensor, all parameters in a row.

The file is written front to back in each kind, a piece at a time, and appears complete or not at all; the header,
whose length is known beforehand, goes in last. The format (8 bytes of little-endian header length, a JSON header, the
data) is that of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
from safetensors import SafetensorError, safe_open

from engine.atomic import atomic_file
from engine.chunkfile import Array, as_bytes
from engine.errors import StageFailedError, UsageError
from engine.full_disk import full_disk_explained
from engine.plan import ITEM_BYTES
from engine.recipe import digest

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
FORMAT, VERSION = "longstraw-optimizer-state", "1"

_DTYPE_CODES = {"float32": "F32", "float64": "F64"}
_LENGTH_BYTES = 8
# The header's length comes first, as a little-endian integer of 64 bits; the header is padded to a multiple of that.


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an optimizer file holds, but for the numbers. ``kinds`` are the moments, with masters or without."""

    shapes: Mapping[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    dtype: str
    checkpoint_dtype: str
    count: int

    @cached_property
    def kind_bytes(self) -> int:
        """Bytes of all tensors of one kind."""
        return sum(math.prod(shape) for shape in self.shapes.values()) * ITEM_BYTES[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header(dict.fromkeys(self.kinds, 0))) + len(self.kinds) * self.kind_bytes

    def header(self, checksums: Mapping[str, int]) -> bytes:
        """Return what stands before the data; its length does not depend on the checksums."""
        header: dict[str, object] = {
            "__metadata__": {
                "format": FORMAT,
                "version": VERSION,
                "count": str(self.count),
                "checkpoint_dtype": self.checkpoint_dtype,
                **{f"crc32c.{kind}": f"{checksums[kind]:08x}" for kind in self.kinds},
            }
        }
        start = 0
        for kind in self.kinds:
            for name, shape in self.shapes.items():
                stop = start + math.prod(shape) * ITEM_BYTES[self.dtype]
                code = _DTYPE_CODES[self.dtype]
                header[f"{kind}.{name}"] = {"dtype": code, "shape": list(shape), "data_offsets": [start, stop]}
                start = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Writer:
    """Takes the numbers of a file: for each kind, those of all parameters in order."""

    def __init__(self, fd: int, contents: Contents) -> None:
        self._fd = fd
        self._first = contents.nbytes - len(contents.kinds) * contents.kind_bytes
        self._start = {kind: self._first + i * contents.kind_bytes for i, kind in enumerate(contents.kinds)}
        self._stop = {kind: start + contents.kind_bytes for kind, start in self._start.items()}
        self.checksums = dict.fromkeys(contents.kinds, 0)

    def append(self, kind: str, array: Array) -> None:
        """Write the next numbers of a kind."""
        self.checksums[kind] = google_crc32c.extend(self.checksums[kind], array.reshape(-1).view(np.uint8))
        rest = as_bytes(array)
        while rest:
            num_written = os.pwrite(self._fd, rest, self._start[kind])
            self._start[kind] += num_written
            rest = rest[num_written:]

    def finish(self, header: bytes) -> None:
        """Write the header."""
        if self._start != self._stop or len(header) != self._first:
            raise ValueError(f"the file is not complete: {self._start}, {self._stop}, {len(header)}, {self._first}")
        os.pwrite(self._fd, header, 0)


@contextmanager
def writing(path: Path, contents: Contents) -> Iterator[Writer]:
    """Yield a `Writer`; at the end the file is at ``path``, whole, or on any error nothing is.

    Raises:
        StoreFullError: the disk has no room.
    """
    with full_disk_explained(path.parent, contents.nbytes, "the optimizer state"), atomic_file(path) as partial:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            writer = Writer(fd, contents)
            yield writer
            writer.finish(contents.header(writer.checksums))
        finally:
            os.close(fd)


@dataclass(frozen=True, kw_only=True)
class OptimizerFile:
    """An optimizer file that is there. ``starts`` are the positions of its tensors, in bytes from its beginning."""

    path: Path
    contents: Contents
    starts: Mapping[str, int]
    checksums: Mapping[str, int]

    @property
    def fingerprint(self) -> str:
        """A hash that changes with what the file holds; its numbers are in it by their checksums."""
        contents = self.contents
        shapes = {name: list(shape) for name, shape in contents.shapes.items()}
        numbers = [contents.count, contents.dtype, contents.checkpoint_dtype]
        return digest([shapes, numbers, dict(self.checksums)])

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Yield a `Reader` of the numbers. Raises StageFailedError if the file has gone or is another by now."""
        try:
            again = read_optimizer_file(self.path)
        except UsageError as error:
            raise StageFailedError(f"the optimizer state can't be read any more: {error}") from error
        if again != self:
            raise StageFailedError(
                f"the optimizer state {self.path} has changed since the run was planned; put it back, then resume"
            )
        with open(self.path, "rb", buffering=0) as file:
            yield Reader(file.fileno(), self)


class Reader:
    """Reads numbers from anywhere in an optimizer file."""

    def __init__(self, fd: int, file: OptimizerFile) -> None:
        self._fd, self._file = fd, file

    def read(self, kind: str, name: str, start: int, out: Array) -> None:
        """Fill ``out`` with numbers of a parameter from its element ``start`` on."""
        position = self._file.starts[f"{kind}.{name}"] + start * out.itemsize
        rest = as_bytes(out)
        while rest:
            num_read = os.preadv(self._fd, [rest], position)
            if not num_read:
                raise StageFailedError(f"the optimizer state {self._file.path} ends early, at byte {position}")
            position += num_read
            rest = rest[num_read:]


def read_optimizer_file(path: Path) -> OptimizerFile:
    """Read what ``path`` holds, but not its numbers.

    Raises:
        UsageError: there is no such file, it is not whole, or it is no optimizer state.
    """
    header, first = _read_header(path)
    metadata = header.pop("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise UsageError(
            f"{path} is a safetensors file, but not an optimizer state (its metadata lacks format={FORMAT!r}); "
            "give the file that a run saved beside its checkpoint"
        )
    if metadata.get("version") != VERSION:
        raise UsageError(
            f"the optimizer state {path} has format version {metadata.get('version')!r}, and only {VERSION!r} is read"
        )
    try:
        contents = _contents(header, metadata)
        checksums = {kind: int(metadata[f"crc32c.{kind}"], 16) for kind in contents.kinds}
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"the optimizer state {path} is damaged: {type(error).__name__}: {error}") from error
    starts = {key: first + entry["data_offsets"][0] for key, entry in header.items()}
    return OptimizerFile(path=path, contents=contents, starts=starts, checksums=checksums)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors header and the position of the data after it, checked by the library."""
    if not path.is_file():
        raise UsageError(f"no optimizer state at {path}; give the file that a run saved beside its checkpoint")
    try:
        with safe_open(path, framework="numpy"):  # holds sizes, offsets and the file's length against each other
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return cast(dict[str, Any], json.loads(file.read(length))), _LENGTH_BYTES + length
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"the optimizer state {path} is damaged, or no safetensors file: {error}") from error


def _contents(header: Mapping[str, Any], metadata: Mapping[str, str]) -> Contents:
    """Return what a header speaks of. Raises KeyError, ValueError or TypeError for one that contradicts itself."""
    kinds = (*MOMENTS, MASTER) if f"crc32c.{MASTER}" in metadata else MOMENTS
    codes = sorted({entry["dtype"] for entry in header.values()})
    names = {code: name for name, code in _DTYPE_CODES.items()}
    if len(codes) != 1 or codes[0] not in names:
        raise ValueError(f"its tensors are {', '.join(codes)}, not all of one of {', '.join(names)}")
    prefix = f"{MOMENTS[0]}."
    shapes = {key.removeprefix(prefix): _shape(entry) for key, entry in header.items() if key.startswith(prefix)}
    expected = {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}
    if wrong := _differing(expected, {key: _shape(entry) for key, entry in header.items()}):
        raise ValueError(f"{wrong[0]} has no equal among its tensors of another kind")
    if metadata["checkpoint_dtype"] not in ITEM_BYTES or int(metadata["count"]) < 1:
        raise ValueError(f"its metadata is {dict(metadata)}")
    return Contents(
        shapes=shapes,
        kinds=kinds,
        dtype=names[codes[0]],
        checkpoint_dtype=metadata["checkpoint_dtype"],
        count=int(metadata["count"]),
    )


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(entry["shape"])


def _differing(left: Mapping[str, object], right: Mapping[str, object]) -> Sequence[str]:
    """Return the keys that one of the two lacks or that they have different things under."""
    return [key for key in dict.fromkeys((*left, *right)) if left.get(key) != right.get(key)]
