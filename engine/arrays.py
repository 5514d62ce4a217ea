"""What an array of the store is, and its zarr v3 metadata on disk.

zarr-python says what the metadata of an array is, once for every dtype and number of axes, and reads it; shape, chunks
and attributes are filled in here, since a run declares thousands of arrays and zarr-python takes milliseconds for each.
The chunks are ours (`engine.chunkfile`). Chunk files lie side by side in the array's folder (``c.3.0.0``): with zarr's
other separator, every chunk of an array of five axes would bring four folders of its own.

A folder is an array or a group from the moment that it has metadata. A process that is killed can leave one without,
or with an empty file, and that is neither.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from engine.atomic import PARTIAL_SUFFIX
from engine.errors import RunDirectoryError, UsageError

Index = tuple[int, ...]

METADATA = "zarr.json"
DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
# Of fixed size, the same in numpy and in the core of zarr v3.
ASYNC_CONCURRENCY = 1
# zarr-python handles only small metadata files here; its default of 10 would pay in threads and gain nothing.
_AGAIN = "resume the run, which makes it again"
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


def array_metadata(spec: ArraySpec) -> dict[str, Any]:
    """Return the metadata of an array."""
    metadata: dict[str, Any] = json.loads(_array_template(spec.dtype, len(spec.shape)))
    metadata["shape"] = spec.shape
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = spec.chunk_shape
    metadata["attributes"] = dict(spec.attributes)
    return metadata


def group_metadata(attributes: Mapping[str, object]) -> dict[str, Any]:
    """Return the metadata of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def create_node(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Make the folder of an array or a group; the one that it lies in must be there. After an error it is not."""
    os.mkdir(folder)
    try:
        write_metadata(folder, metadata)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{folder}/{METADATA}")
        os.rmdir(folder)
        raise


def write_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Make a folder an array or a group."""
    data = json.dumps(metadata).encode()
    fd = os.open(f"{folder}/{METADATA}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.write(fd, data)  # at once, so that a kill leaves all of it or an empty file
    finally:
        os.close(fd)


@cache
def _array_template(dtype: str, num_axes: int) -> str:
    """Return the metadata that zarr-python writes for an array of that dtype and as many axes, as JSON."""
    files: dict[str, Any] = {}
    with zarr.config.set({"async.concurrency": ASYNC_CONCURRENCY}):
        zarr.create_array(
            store=MemoryStore(files),
            shape=(1,) * num_axes,
            dtype=dtype,
            chunks=(1,) * num_axes,
            compressors=None,
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": _SEPARATOR},
            config={"write_empty_chunks": True},
        )
    return str(files[METADATA].to_bytes().decode())


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
        raise RunDirectoryError(f"can't use the zarr array {root / name}: {error}; {_AGAIN}") from error
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
        raise RunDirectoryError(f"can't read zarr metadata {path}: {error}; {_AGAIN}") from error
    if not isinstance(metadata, dict) or "node_type" not in metadata:
        raise RunDirectoryError(f"{path} is not zarr metadata; {_AGAIN}")
    return metadata


def find_arrays(root: Path) -> Iterator[str]:
    """Yield the names of the arrays under ``root``, sorted within their groups."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        match node_type(folder):
            case "array":
                yield folder.name
            case "group":
                yield from (f"{folder.name}/{name}" for name in find_arrays(folder))
