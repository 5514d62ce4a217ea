"""What an array of the store is, and its zarr v3 metadata on disk.

zarr-python writes and reads the metadata; the chunks are ours (`engine.chunkfile`). Chunk files lie side by side in
the array's folder (``c.3.0.0``): with zarr's other separator, every chunk of an array of five axes would bring four
folders of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr

from engine.errors import RunDirectoryError, UsageError
from engine.run import PARTIAL_SUFFIX

Index = tuple[int, ...]

METADATA = "zarr.json"
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
# Of fixed size, the same in numpy and in the core of zarr v3.
ASYNC_CONCURRENCY = 1
# zarr-python handles only small metadata files here; its default of 10 would pay in threads and gain nothing.
_CHUNK = "c"
_SEPARATOR = "."
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """What one array of the store is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    attributes: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def grid_shape(self) -> tuple[int, ...]:
        """How many chunks there are along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as numpy has it."""
        return np.dtype(self.dtype)

    @cached_property
    def chunk_bytes(self) -> int:
        """Size of each chunk file; those at an edge are padded to it."""
        return math.prod(self.chunk_shape) * self.numpy_dtype.itemsize

    def extent(self, index: Index) -> tuple[int, ...]:
        """Return the shape of the data in chunk ``index``: the chunk shape, less at an edge.

        Raises:
            UsageError: there is no such chunk.
        """
        grid = self.grid_shape
        if len(index) != len(grid) or not all(0 <= i < n for i, n in zip(index, grid, strict=True)):
            raise UsageError(f"array {self.name!r} has no chunk {index}: its grid of chunks is {grid}")
        return tuple(min(c, s - i * c) for i, c, s in zip(index, self.chunk_shape, self.shape, strict=True))

    def chunk_key(self, index: Index) -> str:
        """Return the zarr key of chunk ``index``: its path under the root, and its name in the journal."""
        return f"{self.name}/{_SEPARATOR.join([_CHUNK, *map(str, index)])}"


def check_spec(spec: ArraySpec) -> None:
    """Refuse an array that can't be stored.

    Raises:
        UsageError: its name, shape or dtype is not possible.
    """
    for part in spec.name.split("/"):
        if not _SEGMENT.fullmatch(part) or part.startswith("__") or part == METADATA or part.endswith(PARTIAL_SUFFIX):
            raise UsageError(
                f"not a name for an array: {spec.name!r}; use letters, digits and _.+- between slashes, with no part "
                f"that starts with . or __, ends with {PARTIAL_SUFFIX} or is {METADATA}"
            )
    if spec.dtype not in DTYPES:
        raise UsageError(f"array {spec.name!r}: dtype={spec.dtype!r} is not one of {sorted(DTYPES)}")
    sizes_allowed = all(size >= 0 for size in spec.shape) and all(size > 0 for size in spec.chunk_shape)
    if len(spec.shape) != len(spec.chunk_shape) or not sizes_allowed:
        raise UsageError(f"array {spec.name!r}: shape={spec.shape} can't have chunk_shape={spec.chunk_shape}")


def is_chunk(name: str) -> bool:
    """Return whether a file of this name in an array's folder is a chunk."""
    return re.fullmatch(r"c(\.\d+)*", name) is not None


def create_array(root: Path, spec: ArraySpec) -> None:
    """Write the metadata of an array, and of the groups that its name makes."""
    with zarr.config.set({"async.concurrency": ASYNC_CONCURRENCY}):
        zarr.create_array(
            store=root,
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            chunks=spec.chunk_shape,
            compressors=None,
            fill_value=0,
            attributes=cast(dict[str, Any], dict(spec.attributes)),
            chunk_key_encoding={"name": "default", "separator": _SEPARATOR},
            config={"write_empty_chunks": True},
        )


def read_spec(root: Path, name: str) -> ArraySpec:
    """Return what the array ``name`` on disk is.

    Raises:
        RunDirectoryError: its metadata is damaged.
    """
    try:
        array = zarr.open_array(store=root, path=name, mode="r")
        spec = ArraySpec(
            name=name,
            shape=array.shape,
            dtype=str(array.dtype),
            chunk_shape=array.chunks,
            attributes=array.attrs.asdict(),
        )
        check_spec(spec)
    except Exception as error:  # zarr-python raises many kinds for metadata that it can't use
        raise RunDirectoryError(f"can't use the zarr array {root / name}: {error}; start a new run") from error
    return spec


def node_type(folder: Path) -> str | None:
    """Return ``array`` or ``group``, or None for a folder whose metadata never reached the disk."""
    path = folder / METADATA
    if not path.is_file() or path.stat().st_size == 0:
        return None
    return str(read_metadata(path)["node_type"])


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata in a ``zarr.json``.

    Raises:
        RunDirectoryError: it can't be read, or is not metadata.
    """
    try:
        metadata = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"can't read zarr metadata {path}: {error}; restore it or start a new run") from error
    if not isinstance(metadata, dict) or "node_type" not in metadata:
        raise RunDirectoryError(f"{path} is not zarr metadata; restore it or start a new run")
    return metadata


def find_arrays(root: Path) -> Iterator[str]:
    """Yield the names of the arrays under ``root``, sorted within their groups."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        match node_type(folder):
            case "array":
                yield folder.name
            case "group":
                yield from (f"{folder.name}/{name}" for name in find_arrays(folder))
