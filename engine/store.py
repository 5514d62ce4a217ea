"""Tensors of a run on disk: zarr v3 arrays that any zarr reader opens.

zarr-python writes the metadata. The chunk files are written and read here, in zarr's own layout and without codecs:
that is several times faster than through zarr-python and needs no second copy of a chunk. One chunk is one file.
A dtype that zarr lacks is stored as one it has, with an attribute that says so (bfloat16 as uint16 with
``torch_dtype``); this module knows numpy only.

Invariants:

- A chunk is there whole or not at all: space is reserved first, the file is written under a partial name, then
  renamed. A full disk leaves nothing behind.
- A chunk is read only against the CRC32C that was returned when it was written. A missing chunk is an error: zarr
  itself would read it as zeros.
- A chunk is written once; replacing one must be asked for.
- ``nbytes`` counts chunk files, with those being written, by adding up and not by walking the tree. Metadata is not
  counted.

Chunks at the edge of a shape that chunks don't divide are stored padded with zeros, as zarr has it; they alone take
a scratch buffer of one chunk.

Life cycle: ``create``; ``declare`` an array, write and read its chunks, ``remove`` it. The journal keeps what
``checksums`` says. After a crash ``open`` is told the checksums that were committed and deletes every other chunk.
Threads may write and read different chunks at once. One process per store.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr

from engine.chunkfile import Array, crc32c, full_disk_explained, read_file, verify_chunks, write_file
from engine.errors import RunDirectoryError, UsageError
from engine.run import PARTIAL_SUFFIX, partial_path, sync_directory
from engine.units import KIB

Index = tuple[int, ...]

DTYPES = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
# Of fixed size, the same in numpy and in the core of zarr v3.
_MARK = {"longstraw_store": 1}
# On the root group. ``open`` deletes files, so it makes sure first that the tree is one of ours.
_ASYNC_CONCURRENCY = 1
# zarr-python handles only small metadata files here; its default of 10 would pay in threads and gain nothing.
_METADATA = "zarr.json"
_METADATA_BYTES = 4 * KIB
# A block of a file system: what a metadata file takes, for the message of a full disk.
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """What one array of the store is."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """How many chunks there are along each axis."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def chunk_bytes(self) -> int:
        """Size of each chunk file; those at an edge are padded to it."""
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

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
        return "/".join([self.name, "c", *map(str, index)])


class Store:
    """The arrays under one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs: dict[str, ArraySpec] = {}
        self._checksums: dict[str, dict[str, int]] = {}
        self._synced: set[Path] = set()
        self._nbytes = 0
        self._peak_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def create(cls, root: Path) -> Store:
        """Make an empty store at ``root``, with its parents.

        Raises:
            UsageError: there is something at ``root`` already.
            StoreFullError: the disk is full.
        """
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise UsageError(f"can't create a store at {root}: it exists and is not an empty directory")
        with full_disk_explained(root, _METADATA_BYTES, "the metadata of the store"):
            root.mkdir(parents=True, exist_ok=True)
            with zarr.config.set({"async.concurrency": _ASYNC_CONCURRENCY}):
                zarr.create_group(store=root, attributes=dict(_MARK))
        return cls(root)

    @classmethod
    def open(cls, root: Path, checksums: Mapping[str, int]) -> Store:
        """Open the store at ``root`` to go on with it, keeping only the chunks that ``checksums`` names.

        Deletes every other chunk and everything half-written. A chunk of ``checksums`` that is gone is no error
        until it is read: it may have been removed when it was not needed any more.

        Raises:
            RunDirectoryError: there is no store at ``root``, or its metadata is damaged; nothing was deleted.
        """
        store = cls(root)
        _check_mark(root)
        for name in _find_arrays(root):
            store._specs[name] = _read_spec(root, name)
            store._checksums[name] = {}
        _remove_debris(root)
        for name in store._specs:
            store._adopt_chunks(name, checksums)
        store._peak_bytes = store._nbytes
        return store

    @property
    def root(self) -> Path:
        """The directory of the zarr root group."""
        return self._root

    @property
    def nbytes(self) -> int:
        """Bytes of chunk files on disk now, with those that are being written."""
        return self._nbytes

    @property
    def peak_bytes(self) -> int:
        """The most that ``nbytes`` has been since the store was created or opened."""
        return self._peak_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order they were declared."""
        return tuple(self._specs)

    def spec(self, name: str) -> ArraySpec:
        """Return what array ``name`` is.

        Raises:
            UsageError: there is no such array.
        """
        if name not in self._specs:
            raise UsageError(f"no array {name!r} in the store {self._root}; declare it first")
        return self._specs[name]

    def checksums(self, name: str) -> dict[str, int]:
        """Return the CRC32C of every chunk of ``name`` on disk by chunk key, for the journal."""
        self.spec(name)
        with self._lock:
            return dict(self._checksums[name])

    def has_chunk(self, name: str, index: Index) -> bool:
        """Return whether chunk ``index`` of ``name`` has been written and not removed."""
        return self.spec(name).chunk_key(index) in self._checksums[name]

    def declare(
        self,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: str,
        chunk_shape: tuple[int, ...],
        attributes: Mapping[str, object] | None = None,
    ) -> ArraySpec:
        """Create array ``name`` without chunks and return its spec. A ``/`` in the name makes zarr groups.

        Raises:
            UsageError: the name, shape or dtype is not possible, or the name is taken.
            StoreFullError: the disk is full; nothing is left of the array.
        """
        spec = ArraySpec(name=name, shape=shape, dtype=dtype, chunk_shape=chunk_shape, attributes=attributes or {})
        _check_spec(spec)
        with self._lock:
            self._check_name_is_free(name)
            try:
                with full_disk_explained(self._root, _METADATA_BYTES, f"the metadata of array {name!r}"):
                    _create_array(self._root, spec)
            except BaseException:
                shutil.rmtree(self._root / name, ignore_errors=True)
                raise
            self._specs[name] = spec
            self._checksums[name] = {}
        return spec

    def write_chunk(self, name: str, index: Index, array: Array, *, sync: bool = False, replace: bool = False) -> int:
        """Write ``array`` as chunk ``index`` of ``name`` and return the CRC32C of the file.

        With ``sync``, the chunk and all that is needed to find it are on disk when this returns. With ``replace``,
        a chunk that is there already is exchanged in one step; both take space until then. A crash before the new
        checksum is committed leaves a chunk that the journal calls damaged: replace only what can be made again.

        Raises:
            UsageError: no such chunk, or the array has another shape, dtype or layout, or the chunk is there already.
            StoreFullError: the disk has no room; the store is as it was.
        """
        spec = self.spec(name)
        data = _pad(spec, index, _check_buffer(spec, index, array))
        key = spec.chunk_key(index)
        if not replace and key in self._checksums[name]:
            raise UsageError(f"chunk {index} of array {name!r} is written already; remove it first, or replace it")
        crc = crc32c(data)
        self._add_bytes(spec.chunk_bytes)
        try:
            write_file(self._root, key, data, sync=sync)
        except BaseException:
            self._add_bytes(-spec.chunk_bytes)
            raise
        with self._lock:
            replaced = key in self._checksums[name]
            self._checksums[name][key] = crc
        self._add_bytes(-spec.chunk_bytes if replaced else 0)
        if sync:
            self._sync_names(self._root / key)
        return crc

    def read_chunk(self, name: str, index: Index, out: Array) -> None:
        """Fill ``out`` with chunk ``index`` of ``name`` and check it. After an error ``out`` holds garbage.

        Raises:
            UsageError: no such chunk in the array, or ``out`` has another shape, dtype or layout.
            RunDirectoryError: the chunk was never written, is missing, or is damaged.
        """
        spec = self.spec(name)
        target = _check_buffer(spec, index, out)
        if not out.flags.writeable:
            raise UsageError(f"can't read chunk {index} of array {name!r} into a buffer that is read-only")
        key = spec.chunk_key(index)
        crc = self._checksums[name].get(key)
        if crc is None:
            raise RunDirectoryError(f"chunk {index} of array {name!r} was never written ({self._root / key})")
        whole = spec.extent(index) == spec.chunk_shape
        data = target if whole else np.empty(spec.chunk_shape, spec.dtype)
        if problem := read_file(self._root / key, data, crc):
            raise RunDirectoryError(f"chunk {index} of array {name!r} {problem}; start a new run, or restore the file")
        if not whole:
            target[...] = data[_inside(spec, index)]

    def remove_chunk(self, name: str, index: Index) -> None:
        """Delete chunk ``index`` of ``name``.

        Raises:
            UsageError: there is no such chunk.
        """
        spec = self.spec(name)
        spec.extent(index)
        key = spec.chunk_key(index)
        with self._lock:
            if self._checksums[name].pop(key, None) is None:
                raise UsageError(f"can't remove chunk {index} of array {name!r}: it was never written")
        (self._root / key).unlink(missing_ok=True)
        self._add_bytes(-spec.chunk_bytes)

    def remove(self, name: str) -> None:
        """Delete array ``name`` with its chunks. Groups in its name stay.

        Raises:
            UsageError: there is no such array.
        """
        spec = self.spec(name)
        with self._lock:
            num_chunks = len(self._checksums.pop(name))
            del self._specs[name]
            path = self._root / name
            self._synced = {p for p in self._synced if p != path and path not in p.parents}
            gone = partial_path(path)  # renamed first: a crash must not leave half an array
            os.rename(path, gone)
        shutil.rmtree(gone)
        self._add_bytes(-spec.chunk_bytes * num_chunks)

    def verify(self, checksums: Mapping[str, int]) -> list[str]:
        """Return one sentence for each chunk of ``checksums`` that is missing or damaged; see ``verify_chunks``."""
        return verify_chunks(self._root, checksums)

    def _check_name_is_free(self, name: str) -> None:
        for other in self._specs:
            if name == other or name.startswith(f"{other}/"):
                raise UsageError(f"can't declare array {name!r}: {other!r} is an array")
        if (self._root / name).exists():
            raise UsageError(f"can't declare array {name!r}: there is a group of that name")

    def _adopt_chunks(self, name: str, checksums: Mapping[str, int]) -> None:
        """Count the chunks of ``name`` that are on disk and committed, and delete the others."""
        for path in _find_files(self._root / name / "c"):
            key = path.relative_to(self._root).as_posix()
            if key in checksums:
                self._checksums[name][key] = checksums[key]
                self._nbytes += self._specs[name].chunk_bytes
            else:
                path.unlink()

    def _add_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._nbytes)

    def _sync_names(self, path: Path) -> None:
        """Make the name ``path`` durable, and in a new directory also all that leads to it, metadata included."""
        sync_directory(path.parent)
        if path.parent in self._synced:
            return
        for folder in itertools.takewhile(lambda p: p != self._root.parent, path.parents):
            if (folder / _METADATA).exists():
                with open(folder / _METADATA, "rb") as file:
                    os.fsync(file.fileno())
            sync_directory(folder)
        self._synced.add(path.parent)


def _check_spec(spec: ArraySpec) -> None:
    for part in spec.name.split("/"):
        if not _SEGMENT.fullmatch(part) or part.startswith("__") or part == _METADATA or part.endswith(PARTIAL_SUFFIX):
            raise UsageError(
                f"not a name for an array: {spec.name!r}; use letters, digits and _.+- between slashes, with no part "
                f"that starts with . or __, ends with {PARTIAL_SUFFIX} or is {_METADATA}"
            )
    if spec.dtype not in DTYPES:
        raise UsageError(f"array {spec.name!r}: dtype={spec.dtype!r} is not one of {sorted(DTYPES)}")
    sizes_allowed = all(size >= 0 for size in spec.shape) and all(size > 0 for size in spec.chunk_shape)
    if len(spec.shape) != len(spec.chunk_shape) or not sizes_allowed:
        raise UsageError(f"array {spec.name!r}: shape={spec.shape} can't have chunk_shape={spec.chunk_shape}")


def _create_array(root: Path, spec: ArraySpec) -> None:
    with zarr.config.set({"async.concurrency": _ASYNC_CONCURRENCY}):
        zarr.create_array(
            store=root,
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            chunks=spec.chunk_shape,
            compressors=None,
            fill_value=0,
            attributes=cast(dict[str, Any], dict(spec.attributes)),
            config={"write_empty_chunks": True},
        )


def _check_buffer(spec: ArraySpec, index: Index, array: Array) -> Array:
    extent = spec.extent(index)
    if array.shape != extent or array.dtype != np.dtype(spec.dtype) or not array.flags.c_contiguous:
        layout = "" if array.flags.c_contiguous else ", not C-contiguous"
        raise UsageError(
            f"chunk {index} of array {spec.name!r} is {extent} {spec.dtype}, C-contiguous; "
            f"the buffer is {array.shape} {array.dtype}{layout}"
        )
    return array


def _pad(spec: ArraySpec, index: Index, array: Array) -> Array:
    if array.shape == spec.chunk_shape:
        return array
    padded = np.zeros(spec.chunk_shape, spec.dtype)
    padded[_inside(spec, index)] = array
    return padded


def _inside(spec: ArraySpec, index: Index) -> tuple[slice, ...]:
    """Return the part of chunk ``index`` that is inside the shape."""
    return tuple(slice(size) for size in spec.extent(index))


def _node_type(folder: Path) -> str | None:
    """Return ``array`` or ``group``, or None for a folder whose metadata never reached the disk."""
    path = folder / _METADATA
    if not path.is_file() or path.stat().st_size == 0:
        return None
    return str(_read_metadata(path)["node_type"])


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"can't read zarr metadata {path}: {error}; restore it or start a new run") from error
    if not isinstance(metadata, dict) or "node_type" not in metadata:
        raise RunDirectoryError(f"{path} is not zarr metadata; restore it or start a new run")
    return metadata


def _check_mark(root: Path) -> None:
    attributes = _read_metadata(root / _METADATA).get("attributes")
    if not isinstance(attributes, dict) or not _MARK.items() <= attributes.items():
        raise RunDirectoryError(f"{root} is a zarr group, but not the store of a run: it lacks the attributes {_MARK}")


def _find_arrays(root: Path) -> Iterator[str]:
    """Yield the names of the arrays under ``root``, sorted within their groups."""
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        match _node_type(folder):
            case "array":
                yield folder.name
            case "group":
                yield from (f"{folder.name}/{name}" for name in _find_arrays(folder))


def _read_spec(root: Path, name: str) -> ArraySpec:
    try:
        array = zarr.open_array(store=root, path=name, mode="r")
        spec = ArraySpec(
            name=name,
            shape=array.shape,
            dtype=str(array.dtype),
            chunk_shape=array.chunks,
            attributes=array.attrs.asdict(),
        )
        _check_spec(spec)
    except Exception as error:  # zarr-python raises many kinds for metadata that it can't use
        raise RunDirectoryError(f"can't use the zarr array {root / name}: {error}; start a new run") from error
    return spec


def _remove_debris(group: Path) -> None:
    """Delete what a killed process left half-made: partial files, folders without metadata."""
    for path in list(group.iterdir()):
        if path.is_dir():
            kind = None if path.name.endswith(PARTIAL_SUFFIX) else _node_type(path)
            if kind is None:
                shutil.rmtree(path)
            elif kind == "group":
                _remove_debris(path)
        elif path.name.endswith(PARTIAL_SUFFIX):
            path.unlink()


def _find_files(path: Path) -> Iterator[Path]:
    """Yield the files under ``path``, or itself if it is one."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for folder, _, names in os.walk(path):
            yield from (Path(folder) / name for name in names)
