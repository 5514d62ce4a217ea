"""Tensors of a run on disk: zarr v3 arrays that any zarr reader opens.

The metadata is zarr-python's (`engine.arrays`). The chunk files are written and read by `engine.chunkfile`, in
zarr's own layout and without codecs: that is several times faster than through zarr-python and needs no second copy
of a chunk. One chunk is one file.
A dtype that zarr lacks is stored as one it has, with an attribute that says so (bfloat16 as uint16 with
``torch_dtype``); this module knows numpy only.

Invariants:

- A chunk counts as written once its checksum is known. An error while it is written leaves no chunk; a killed process
  may leave half of one, which no committed checksum fits.
- A chunk is read only against the CRC32C that was returned when it was written. A missing chunk is an error: zarr
  itself would read it as zeros.
- A chunk is written once; replacing one must be asked for.
- What was written is safe from a killed process, and from a power cut once ``sync`` has returned. Most of what a run
  writes can be made again, and is not synced.
- ``nbytes`` counts chunk files, with those being written, by adding up and not by walking the tree. Metadata is not
  counted.

Chunks at the edge of a shape that chunks don't divide are stored padded with zeros, as zarr has it; they alone take
a scratch buffer of one chunk.

Life cycle: ``create``; ``declare`` an array, write and read its chunks, ``sync`` it where that is asked for, ``remove``
it. The journal keeps what ``checksums`` says. After a crash ``open`` is told the checksums that were committed and
deletes every other chunk. Threads may write and read different chunks at once. One process per store.

A run that is resumed begins again with a new store. ``open`` is for a resume inside the step, and
`engine.chunkfile.verify_chunks` for a check of a run's checksums; no command does either yet.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from engine.arrays import (
    METADATA,
    ArraySpec,
    Index,
    array_metadata,
    check_spec,
    create_node,
    find_arrays,
    group_metadata,
    is_chunk,
    node_type,
    read_metadata,
    read_spec,
    write_metadata,
)
from engine.atomic import PARTIAL_SUFFIX, sync_directory
from engine.chunkfile import Array, read_file, sync_files, write_file
from engine.errors import RunDirectoryError, UsageError
from engine.full_disk import full_disk_explained
from engine.units import KIB

_MARK = {"longstraw_store": 1}
# On the root group. ``open`` deletes files, so it makes sure first that the tree is one of ours.
_METADATA_BYTES = 4 * KIB
# A block of a file system: what a metadata file takes, for the message of a full disk.


class Store:
    """The arrays under one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs: dict[str, ArraySpec] = {}
        self._checksums: dict[str, dict[str, int]] = {}
        self._groups: set[str] = set()  # that are there for sure
        self._synced: set[Path] = set()  # folders whose metadata and own name are durable
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
            write_metadata(root, group_metadata(_MARK))
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
        for name in find_arrays(root):
            store._specs[name] = read_spec(root, name)
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
        check_spec(spec)
        with self._lock:
            self._check_name_is_free(name)
            with full_disk_explained(self._root, _METADATA_BYTES, f"the metadata of array {name!r}"):
                self._make_groups(name)
                create_node(self._root / name, array_metadata(spec))
            self._specs[name] = spec
            self._checksums[name] = {}
        return spec

    def write_chunk(self, name: str, index: Index, array: Array, *, replace: bool = False) -> int:
        """Write ``array`` as chunk ``index`` of ``name`` and return the CRC32C of the file.

        With ``replace``, a chunk that is there already is overwritten where it lies. A crash before the new checksum is
        committed leaves a chunk that the journal calls damaged: replace only what can be made again.

        Raises:
            UsageError: no such chunk, or the array has another shape, dtype or layout, or the chunk is there already.
            StoreFullError: the disk has no room; the chunk is not there, others are as they were.
        """
        spec = self.spec(name)
        data = _pad(spec, index, _check_buffer(spec, index, array))
        key = spec.chunk_key(index)
        known = key in self._checksums[name]
        if known and not replace:
            raise UsageError(f"chunk {index} of array {name!r} is written already; remove the array, or replace it")
        if not known:
            self._add_bytes(spec.chunk_bytes)
        try:
            crc = write_file(self._root, key, data, replace=known)
        except BaseException:
            with self._lock:
                self._checksums[name].pop(key, None)
            self._add_bytes(-spec.chunk_bytes)
            raise
        with self._lock:
            self._checksums[name][key] = crc
        return crc

    def sync(self, name: str) -> None:
        """Make array ``name`` durable as it is now: its chunks, its metadata and every name that leads to them.

        Raises:
            UsageError: there is no such array.
        """
        chunks = [f"{self._root}/{key}" for key in self.checksums(name)]
        array, outside = self._root / name, {self._root.parent, *self._synced}
        new = list(itertools.takewhile(lambda folder: folder not in outside, (array, *array.parents)))
        sync_files([*chunks, *(f"{folder}/{METADATA}" for folder in new)])
        for folder in (array, *(folder.parent for folder in new)):
            sync_directory(folder)
        self._synced.update(new)

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
        if problem := read_file(f"{self._root}/{key}", data, crc):
            raise RunDirectoryError(
                f"chunk {index} of array {name!r} {problem}; `engine resume {self._root.parent}` makes it again"
            )
        if not whole:
            target[...] = data[_inside(spec, index)]

    def remove(self, name: str) -> None:
        """Delete array ``name`` with its chunks. Groups in its name stay.

        Raises:
            UsageError: there is no such array.
        """
        spec = self.spec(name)
        path = self._root / name
        with self._lock:
            chunks = self._checksums.pop(name)
            del self._specs[name]
            self._synced.discard(path)
        os.unlink(path / METADATA)  # first: without it, what a crash leaves is no array
        for key in chunks:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._root}/{key}")
        shutil.rmtree(path)
        self._add_bytes(-spec.chunk_bytes * len(chunks))

    def _check_name_is_free(self, name: str) -> None:
        for other in (*_outer_names(name), name):
            if other in self._specs:
                raise UsageError(f"can't declare array {name!r}: {other!r} is an array")
        if (self._root / name).exists():
            raise UsageError(f"can't declare array {name!r}: there is a group of that name")

    def _make_groups(self, name: str) -> None:
        """Make the groups that an array lies in, from the outermost inwards."""
        for group in _outer_names(name):
            if group not in self._groups:
                with contextlib.suppress(FileExistsError):
                    create_node(self._root / group, group_metadata({}))
                self._groups.add(group)

    def _adopt_chunks(self, name: str, checksums: Mapping[str, int]) -> None:
        """Count the chunks of ``name`` that are on disk and committed, and delete the others."""
        for path in list((self._root / name).iterdir()):
            key = f"{name}/{path.name}"
            if is_chunk(path.name) and key in checksums:
                self._checksums[name][key] = checksums[key]
                self._nbytes += self._specs[name].chunk_bytes
            elif path.name != METADATA:
                path.unlink()

    def _add_bytes(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._nbytes)


def _outer_names(name: str) -> Iterator[str]:
    """Yield the names of the groups that an array of this name lies in, the outermost first."""
    parts = name.split("/")[:-1]
    return ("/".join(parts[: end + 1]) for end in range(len(parts)))


def _check_buffer(spec: ArraySpec, index: Index, array: Array) -> Array:
    extent = spec.extent(index)
    if array.shape != extent or array.dtype != spec.numpy_dtype or not array.flags.c_contiguous:
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


def _check_mark(root: Path) -> None:
    attributes = read_metadata(root / METADATA).get("attributes")
    if not isinstance(attributes, dict) or not _MARK.items() <= attributes.items():
        raise RunDirectoryError(f"{root} is a zarr group, but not the store of a run: it lacks the attributes {_MARK}")


def _remove_debris(group: Path) -> None:
    """Delete what a killed process left half-made: partial files, folders without metadata."""
    for path in list(group.iterdir()):
        if path.is_dir():
            kind = None if path.name.endswith(PARTIAL_SUFFIX) else node_type(path)
            if kind is None:
                shutil.rmtree(path)
            elif kind == "group":
                _remove_debris(path)
        elif path.name.endswith(PARTIAL_SUFFIX):
            path.unlink()
