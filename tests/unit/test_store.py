"""The store: what is read is what was written, to us and to any zarr reader, or an error."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import google_crc32c
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.arrays import DTYPES, ArraySpec, find_arrays
from engine.chunkfile import BLOCK_BYTES, SYNCED_AT_ONCE, verify_chunks
from engine.errors import RunDirectoryError, StageFailedError, StoreFullError, UsageError
from engine.store import Store
from tests.limits import files_of_at_most

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def declare_line(store: Store, name: str = "layers/0/k", num_chunks: int = 3) -> ArraySpec:
    """An array of ``num_chunks`` chunks of 4 float32: 16 bytes each."""
    return store.declare(name, shape=(4 * num_chunks,), dtype="float32", chunk_shape=(4,))


def line(value: float) -> Array:
    return np.full(4, value, np.float32)


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def chunk_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "zarr.json"]


def is_written(store: Store, name: str) -> bool:
    """Whether the first chunk of an array counts as written."""
    return f"{name}/c.0" in store.checksums(name)


def write_all(store: Store, spec: ArraySpec, array: Array) -> None:
    for index in itertools.product(*map(range, spec.grid_shape)):
        place = tuple(slice(i * c, i * c + c) for i, c in zip(index, spec.chunk_shape, strict=True))
        store.write_chunk(spec.name, index, np.array(array[place], order="C"))


def read_with_tensorstore(path: Path) -> Array:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


def declare_large(store: Store) -> Array:
    """Declare an array ``large`` and return a chunk of it, which takes more than one write."""
    chunk = np.ones(BLOCK_BYTES + 16, np.uint8)
    store.declare("large", shape=(2 * chunk.size,), dtype="uint8", chunk_shape=chunk.shape)
    return chunk


def fill_disk(monkeypatch: pytest.MonkeyPatch, function: str, code: int = errno.ENOSPC) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, fail)


@st.composite
def arrays_in_chunks(draw: st.DrawFn) -> tuple[Array, tuple[int, ...]]:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=5))
    chunk_shape = tuple(draw(st.integers(1, size + 1)) for size in shape)
    dtype = np.dtype(draw(st.sampled_from(sorted(DTYPES))))
    return draw(hnp.arrays(dtype, shape)), chunk_shape


@given(case=arrays_in_chunks())
@settings(deadline=None, max_examples=60)
def test_every_dtype_and_shape_comes_back_bit_for_bit_to_us_and_to_zarr(case: tuple[Array, tuple[int, ...]]) -> None:
    array, chunk_shape = case
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder))
        spec = store.declare("a/b", shape=array.shape, dtype=str(array.dtype), chunk_shape=chunk_shape)
        write_all(store, spec, array)
        for index in itertools.product(*map(range, spec.grid_shape)):
            out = np.empty(spec.extent(index), array.dtype)
            store.read_chunk("a/b", index, out)
            place = tuple(slice(i * c, i * c + c) for i, c in zip(index, chunk_shape, strict=True))
            assert out.tobytes() == array[place].tobytes()
        outside = zarr.open_group(folder, mode="r")["a/b"]
        assert isinstance(outside, zarr.Array)
        assert np.asarray(outside[...]).tobytes() == array.tobytes()
        assert outside.dtype == array.dtype
        assert store.nbytes == sum(path.stat().st_size for path in chunk_files(Path(folder)))


@given(case=arrays_in_chunks())
@settings(deadline=None, max_examples=20)
def test_what_zarr_writes_into_a_declared_array_has_the_bytes_that_we_write(
    case: tuple[Array, tuple[int, ...]],
) -> None:
    array, chunk_shape = case
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder))
        ours = store.declare("ours", shape=array.shape, dtype=str(array.dtype), chunk_shape=chunk_shape)
        store.declare("zarrs", shape=array.shape, dtype=str(array.dtype), chunk_shape=chunk_shape)
        write_all(store, ours, array)
        with zarr.config.set({"array.write_empty_chunks": True}):
            zarr.open_array(folder, path="zarrs", mode="r+")[...] = array
        ours_files, zarr_files = (
            {p.relative_to(Path(folder) / name): p.read_bytes() for p in chunk_files(Path(folder) / name)}
            for name in ("ours", "zarrs")
        )
        assert ours_files == zarr_files


@given(case=arrays_in_chunks())
@settings(deadline=None, max_examples=30)
def test_another_implementation_of_zarr_reads_the_same_bits(case: tuple[Array, tuple[int, ...]]) -> None:
    array, chunk_shape = case
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder))
        spec = store.declare("a/b", shape=array.shape, dtype=str(array.dtype), chunk_shape=chunk_shape)
        write_all(store, spec, array)
        outside = read_with_tensorstore(Path(folder) / "a/b")
        assert (outside.dtype, outside.shape) == (array.dtype, array.shape)
        assert outside.tobytes() == array.tobytes()


def test_bfloat16_is_readable_outside_as_uint16_with_an_attribute_that_says_so(store: Store) -> None:
    bits = np.arange(0x3F80, 0x3F80 + 12, dtype=np.uint16).reshape(3, 4)
    store.declare(
        "k", shape=(3, 4), dtype="uint16", chunk_shape=(2, 4), attributes={"torch_dtype": "bfloat16", "layer": 3}
    )
    store.write_chunk("k", (0, 0), bits[:2])
    store.write_chunk("k", (1, 0), bits[2:])
    outside = zarr.open_array(store.root, path="k", mode="r")
    assert outside.attrs.asdict() == {"torch_dtype": "bfloat16", "layer": 3}
    as_float32 = (np.asarray(outside[...]).astype(np.uint32) << 16).view(np.float32)
    assert as_float32[0, 0] == 1.0
    assert as_float32[0, 1] == 1.0078125
    assert np.array_equal(outside[...], bits)
    assert np.array_equal(read_with_tensorstore(store.root / "k"), bits)


def test_names_with_slashes_are_zarr_groups(store: Store) -> None:
    declare_line(store, "policy/layers/0/k")
    declare_line(store, "policy/layers/0/v")
    group = zarr.open_group(store.root, mode="r")
    members = dict(group.members(max_depth=None))
    assert sorted(members) == ["policy", "policy/layers", "policy/layers/0", "policy/layers/0/k", "policy/layers/0/v"]
    assert list(find_arrays(store.root)) == ["policy/layers/0/k", "policy/layers/0/v"]


def test_the_checksum_is_the_crc32c_of_the_file_under_its_zarr_key(store: Store) -> None:
    spec = declare_line(store)
    crc = store.write_chunk("layers/0/k", (1,), line(2))
    assert spec.chunk_key((1,)) == "layers/0/k/c.1"
    assert crc == google_crc32c.value((store.root / "layers/0/k/c.1").read_bytes())
    assert store.checksums("layers/0/k") == {"layers/0/k/c.1": crc}


@given(bit=st.integers(0, 8 * 16 - 1))
@settings(deadline=None, max_examples=30)
def test_any_flipped_bit_is_an_error_that_names_array_chunk_and_file(bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store.create(Path(folder))
        declare_line(store)
        store.write_chunk("layers/0/k", (2,), line(1))
        path = Path(folder) / "layers/0/k/c.2"
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(RunDirectoryError) as caught:
            store.read_chunk("layers/0/k", (2,), np.empty(4, np.float32))
        assert f"chunk (2,) of array 'layers/0/k' is damaged: CRC32C of {path} is" in str(caught.value)
        assert str(caught.value).endswith(f"; `engine resume {store.root.parent}` makes it again")


def test_a_flipped_bit_in_the_padding_of_an_edge_chunk_is_an_error_too(store: Store) -> None:
    store.declare("edge", shape=(5,), dtype="uint8", chunk_shape=(4,))
    store.write_chunk("edge", (1,), np.ones(1, np.uint8))
    path = store.root / "edge/c.1"
    assert path.read_bytes() == b"\1\0\0\0"
    path.write_bytes(b"\1\0\0\1")
    with pytest.raises(RunDirectoryError, match="damaged"):
        store.read_chunk("edge", (1,), np.empty(1, np.uint8))


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_file_of_another_size_is_an_error(store: Store, size: int) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(0))
    (store.root / "layers/0/k/c.0").write_bytes(bytes(size))
    with pytest.raises(RunDirectoryError, match=f"has {size} bytes, not 16"):
        store.read_chunk("layers/0/k", (0,), np.empty(4, np.float32))


def test_a_missing_chunk_is_an_error_and_never_zeros(store: Store) -> None:
    declare_line(store)
    out = line(7)
    with pytest.raises(RunDirectoryError, match=r"chunk \(0,\) of array 'layers/0/k' was never written"):
        store.read_chunk("layers/0/k", (0,), out)
    store.write_chunk("layers/0/k", (0,), line(1))
    (store.root / "layers/0/k/c.0").unlink()
    with pytest.raises(RunDirectoryError, match=r"chunk \(0,\) of array 'layers/0/k' is missing: .*/layers/0/k/c.0"):
        store.read_chunk("layers/0/k", (0,), out)
    assert np.array_equal(out, line(7))


def test_a_chunk_of_zeros_is_written_like_any_other(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(0))
    assert store.nbytes == 16
    out = line(7)
    store.read_chunk("layers/0/k", (0,), out)
    assert np.array_equal(out, line(0))


def test_bytes_are_counted_once_when_replaced_and_given_back(store: Store) -> None:
    declare_line(store)
    declare_line(store, "v", num_chunks=2)
    for index in range(3):
        store.write_chunk("layers/0/k", (index,), line(index))
    store.write_chunk("v", (0,), line(0))
    assert (store.nbytes, store.peak_bytes) == (64, 64)
    store.write_chunk("v", (0,), line(1), replace=True)
    assert (store.nbytes, store.peak_bytes) == (64, 64)
    store.remove("layers/0/k")
    assert (store.nbytes, store.peak_bytes) == (16, 64)
    assert files(store.root) == ["layers/0/zarr.json", "layers/zarr.json", "v/c.0", "v/zarr.json", "zarr.json"]


def test_a_chunk_is_written_once_unless_replacing_is_asked_for(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    with pytest.raises(UsageError, match=r"chunk \(0,\) of array 'layers/0/k' is written already"):
        store.write_chunk("layers/0/k", (0,), line(2))
    out = line(0)
    store.read_chunk("layers/0/k", (0,), out)
    assert np.array_equal(out, line(1))
    store.write_chunk("layers/0/k", (0,), line(2), replace=True)
    store.read_chunk("layers/0/k", (0,), out)
    assert np.array_equal(out, line(2))


def test_a_removed_name_can_be_declared_again_with_another_shape(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    store.sync("layers/0/k")
    store.remove("layers/0/k")
    with pytest.raises(UsageError, match="no array 'layers/0/k'"):
        store.spec("layers/0/k")
    store.declare("layers/0/k", shape=(2, 2), dtype="int8", chunk_shape=(2, 2))
    store.write_chunk("layers/0/k", (0, 0), np.ones((2, 2), np.int8))
    assert store.nbytes == 4
    store.sync("layers/0/k")


@pytest.mark.parametrize("function", ["posix_fallocate", "write", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_was_needed_and_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    chunk = declare_large(store)
    before = files(store.root)
    fill_disk(monkeypatch, function, code)
    with pytest.raises(StoreFullError) as caught:
        store.write_chunk("large", (0,), chunk)
    monkeypatch.undo()
    assert isinstance(caught.value, StageFailedError)
    assert caught.value.needed_bytes == chunk.nbytes
    assert caught.value.free_bytes > 0
    assert "no room for chunk large/c.0: it needs 1048592 bytes (1.00 MiB)" in str(caught.value)
    assert f"the disk of {store.root} has {caught.value.free_bytes} free" in str(caught.value)
    assert files(store.root) == before
    assert (store.nbytes, is_written(store, "large")) == (0, False)
    store.write_chunk("large", (0,), chunk)


def test_space_is_reserved_before_the_first_byte_of_a_chunk_that_takes_several_writes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = declare_large(store)
    written: list[int] = []
    fill_disk(monkeypatch, "posix_fallocate")
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)))
    with pytest.raises(StoreFullError):
        store.write_chunk("large", (0,), chunk)
    assert written == []


def test_a_disk_that_fills_in_the_middle_of_a_write_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_line(store)
    real_write = os.write

    def write(fd: int, data: memoryview) -> int:
        if len(data) <= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(fd, data[:8])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StoreFullError, match="it needs 16 bytes"):
        store.write_chunk("layers/0/k", (0,), line(1))
    assert (store.nbytes, chunk_files(store.root)) == (0, [])


def test_a_file_longer_than_the_process_may_write_is_told_with_that_limit(store: Store) -> None:
    chunk = declare_large(store)
    with files_of_at_most(BLOCK_BYTES), pytest.raises(StoreFullError) as caught:
        store.write_chunk("large", (0,), chunk)
    assert f"a file in {store.root} may have {BLOCK_BYTES} at most (1.00 MiB): File too large" in str(caught.value)
    assert str(caught.value).endswith("; allow longer files (ulimit -f), then resume the run")
    assert (store.nbytes, chunk_files(store.root)) == (0, [])


def test_replacing_needs_no_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = declare_large(store)
    store.write_chunk("large", (0,), chunk)
    inode = (store.root / "large/c.0").stat().st_ino
    fill_disk(monkeypatch, "posix_fallocate")
    store.write_chunk("large", (0,), 2 * chunk, replace=True)
    assert (store.root / "large/c.0").stat().st_ino == inode
    assert chunk_files(store.root) == [store.root / "large/c.0"]


def test_a_replacement_that_fails_leaves_no_chunk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    fill_disk(monkeypatch, "write")
    with pytest.raises(StoreFullError):
        store.write_chunk("layers/0/k", (0,), line(2), replace=True)
    assert (store.nbytes, is_written(store, "layers/0/k"), chunk_files(store.root)) == (0, False, [])
    with pytest.raises(RunDirectoryError, match="was never written"):
        store.read_chunk("layers/0/k", (0,), line(0))


@pytest.mark.parametrize("num_new", [1, 5, 15])
def test_a_replacement_that_was_cut_short_by_a_kill_never_passes_for_a_chunk(store: Store, num_new: int) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    path, committed = store.root / "layers/0/k/c.0", store.checksums("layers/0/k")
    old = path.read_bytes()
    new = bytes(255 - byte for byte in old)
    path.write_bytes(new[:num_new] + old[num_new:])
    again = Store.open(store.root, committed)
    with pytest.raises(RunDirectoryError, match="damaged"):
        again.read_chunk("layers/0/k", (0,), line(0))


@pytest.mark.parametrize("function", ["write", "open", "mkdir"])
def test_a_full_disk_while_declaring_leaves_no_array(
    store: Store, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    declare_line(store, "other/k")
    before = sorted(store.root.rglob("*"))
    for name in ("k", "group/k", "other/v"):
        fill_disk(monkeypatch, function)
        with pytest.raises(StoreFullError, match=f"no room for the metadata of array '{name}'"):
            declare_line(store, name)
        monkeypatch.undo()
        assert sorted(store.root.rglob("*")) == before
    declare_line(store, "k")
    declare_line(store, "group/k")
    assert list(find_arrays(store.root)) == ["group/k", "k", "other/k"]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("num_axes", [0, 1, 3])
def test_an_array_has_the_metadata_that_zarr_itself_writes(store: Store, dtype: str, num_axes: int) -> None:
    shape, chunk_shape = (5, 1, 7)[:num_axes], (2, 1, 7)[:num_axes]
    attributes = {"torch_dtype": "bfloat16", "layer": [3]}
    store.declare("a/ours", shape=shape, dtype=dtype, chunk_shape=chunk_shape, attributes=attributes)
    zarr.create_array(
        store=store.root,
        name="zarrs",
        shape=shape,
        dtype=dtype,
        chunks=chunk_shape,
        compressors=None,
        fill_value=0,
        attributes=cast(dict[str, Any], attributes),
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    zarr.create_group(store=store.root, path="b")
    for ours, theirs in (("a/ours", "zarrs"), ("a", "b")):
        found, expected = (json.loads((store.root / name / "zarr.json").read_text()) for name in (ours, theirs))
        assert found == expected


def test_another_error_of_the_disk_is_passed_on_and_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_line(store)
    fill_disk(monkeypatch, "write", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        store.write_chunk("layers/0/k", (0,), line(1))
    assert chunk_files(store.root) == []
    assert store.nbytes == 0


def test_an_interrupt_while_writing_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    declare_line(store)
    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.write_chunk("layers/0/k", (0,), line(1))
    assert chunk_files(store.root) == []
    assert store.nbytes == 0


def test_a_file_system_that_cannot_reserve_space_is_written_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = declare_large(store)
    fill_disk(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
    store.write_chunk("large", (0,), chunk)
    assert verify_chunks(store.root, store.checksums("large")) == []


@pytest.fixture
def synced(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced from now on, beside the store."""
    names: list[str] = []

    def noted(sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(fd: int) -> None:
            names.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), store.root))
            sync(fd)

        return note

    for function in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, function, noted(getattr(os, function)))
    return names


def test_nothing_is_synced_that_was_not_asked_for(store: Store, synced: list[str]) -> None:
    declare_line(store, "a/k")
    store.write_chunk("a/k", (0,), line(1))
    store.write_chunk("a/k", (0,), line(2), replace=True)
    store.remove("a/k")
    assert synced == []


def test_a_synced_array_is_durable_with_every_name_that_leads_to_it(store: Store, synced: list[str]) -> None:
    declare_line(store, "a/k")
    declare_line(store, "a/v")
    for name in ("a/k", "a/v"):
        store.write_chunk(name, (1,), line(1))
    store.sync("a/k")
    assert synced == ["a/k/c.1", "a/k/zarr.json", "a/zarr.json", "zarr.json", "a/k", "a", ".", ".."]


def test_syncing_again_syncs_chunks_and_only_the_names_that_are_new(store: Store, synced: list[str]) -> None:
    declare_line(store, "a/k")
    store.write_chunk("a/k", (1,), line(1))
    store.sync("a/k")
    synced.clear()
    store.write_chunk("a/k", (0,), line(2))
    store.sync("a/k")
    assert sorted(synced[:2]) == ["a/k/c.0", "a/k/c.1"]
    assert synced[2:] == ["a/k"]
    synced.clear()
    declare_line(store, "a/v")
    store.sync("a/v")
    assert synced == ["a/v/zarr.json", "a/v", "a"]
    synced.clear()
    declare_line(store, "b/k")
    store.sync("b/k")
    assert synced == ["b/k/zarr.json", "b/zarr.json", "b/k", "b", "."]
    synced.clear()
    store.remove("a/v")
    declare_line(store, "a/v")
    store.sync("a/v")
    assert synced == ["a/v/zarr.json", "a/v", "a"]


def test_many_chunks_are_synced_with_few_files_open(store: Store, synced: list[str]) -> None:
    spec = declare_line(store, num_chunks=3 * SYNCED_AT_ONCE + 1)
    for index in range(3 * SYNCED_AT_ONCE + 1):
        store.write_chunk(spec.name, (index,), line(index))
    opened: list[int] = []
    real_open = os.open

    def note(*arguments: Any, **more: Any) -> int:
        opened.append(len(os.listdir("/proc/self/fd")))
        return real_open(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", note)
        store.sync(spec.name)
    assert max(opened) - min(opened) <= SYNCED_AT_ONCE
    assert sorted(name for name in synced if "/c." in name) == sorted(store.checksums(spec.name))


def test_a_sync_that_fails_is_done_again_with_all_that_leads_there(store: Store, synced: list[str]) -> None:
    declare_line(store, "a/k")
    working = os.fsync

    def failing(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/a"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        working(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            store.sync("a/k")
    synced.clear()
    store.sync("a/k")
    assert synced == ["a/k/zarr.json", "a/zarr.json", "zarr.json", "a/k", "a", ".", ".."]


@pytest.mark.parametrize("num_steps", range(4))
def test_a_removal_that_was_cut_short_by_a_kill_leaves_an_array_or_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    declare_line(store)
    for index in range(2):
        store.write_chunk("layers/0/k", (index,), line(index))
    committed = store.checksums("layers/0/k")
    steps = iter(range(num_steps))
    real_unlink = os.unlink

    def unlink(path: str | Path) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        real_unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        patch.setattr(shutil, "rmtree", unlink)
        with pytest.raises(KeyboardInterrupt):
            store.remove("layers/0/k")
    again = Store.open(store.root, committed)
    if num_steps:
        assert list(find_arrays(again.root)) == []
        assert files(store.root) == ["layers/0/zarr.json", "layers/zarr.json", "zarr.json"]
        declare_line(again)
    else:
        assert again.nbytes == 32


def test_opening_again_keeps_the_committed_chunks_and_deletes_everything_else(store: Store) -> None:
    declare_line(store)
    store.declare("point", shape=(), dtype="int64", chunk_shape=(), attributes={"a": [1]})
    for index in range(3):
        store.write_chunk("layers/0/k", (index,), line(index))
    store.write_chunk("point", (), np.array(5))
    committed = {**store.checksums("layers/0/k"), **store.checksums("point")}
    del committed["layers/0/k/c.1"]
    expected = [name for name in files(store.root) if name != "layers/0/k/c.1"]
    (store.root / "layers/0/k/.c.2.0.partial").write_bytes(b"half")
    (store.root / "zarr.0.partial").write_bytes(b"half")
    (store.root / "layers/.gone.0.partial/c").mkdir(parents=True)
    (store.root / "never_declared/c").mkdir(parents=True)
    (store.root / "never_declared/zarr.json").touch()
    again = Store.open(store.root, committed)
    assert files(store.root) == expected
    assert not (store.root / "never_declared").exists()
    assert (again.nbytes, again.peak_bytes) == (40, 40)
    for name in ("layers/0/k", "point"):
        assert again.spec(name) == store.spec(name)
    out = line(7)
    again.read_chunk("layers/0/k", (2,), out)
    assert np.array_equal(out, line(2))
    with pytest.raises(RunDirectoryError, match="was never written"):
        again.read_chunk("layers/0/k", (1,), out)
    again.write_chunk("layers/0/k", (1,), line(1))


def test_a_committed_chunk_that_is_gone_is_no_error_until_it_is_read(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    committed = store.checksums("layers/0/k")
    (store.root / "layers/0/k/c.0").unlink()
    again = Store.open(store.root, committed)
    assert again.nbytes == 0
    with pytest.raises(RunDirectoryError, match="was never written"):
        again.read_chunk("layers/0/k", (0,), line(0))


def test_what_is_not_the_store_of_a_run_is_refused_and_not_cleaned(tmp_path: Path) -> None:
    zarr.create_array(store=tmp_path / "other", name="a", shape=(4,), dtype="int8", chunks=(4,))[:] = 1
    before = files(tmp_path)
    for root in (tmp_path / "other", tmp_path / "other" / "a", tmp_path / "nothing"):
        with pytest.raises(RunDirectoryError):
            Store.open(root, {})
    assert files(tmp_path) == before


def test_damaged_metadata_is_an_error_and_nothing_is_deleted(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(1))
    (store.root / "layers/0/k/zarr.json").write_text("{")
    before = files(store.root)
    with pytest.raises(RunDirectoryError, match=r"can't read zarr metadata .*layers/0/k/zarr\.json"):
        Store.open(store.root, {})
    (store.root / "layers/0/k/zarr.json").write_text('{"node_type": "array", "shape": "many"}')
    with pytest.raises(RunDirectoryError, match=r"can't use the zarr array .*layers/0/k"):
        Store.open(store.root, {})
    assert files(store.root) == before


def test_creating_over_something_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="is not an empty directory"):
        Store.create(store.root)


def test_verifying_reports_every_missing_and_damaged_chunk_and_no_other(store: Store) -> None:
    declare_line(store)
    for index in range(3):
        store.write_chunk("layers/0/k", (index,), line(index))
    checksums = store.checksums("layers/0/k")
    assert verify_chunks(store.root, checksums) == []
    (store.root / "layers/0/k/c.0").unlink()
    (store.root / "layers/0/k/c.2").write_bytes(bytes(16))
    missing, damaged = verify_chunks(store.root, checksums)
    assert f"chunk layers/0/k/c.0 can't be read: {store.root}/layers/0/k/c.0: No such file" in missing
    assert "chunk layers/0/k/c.2 is damaged: CRC32C of" in damaged


@pytest.mark.parametrize(
    "name",
    ["", "/a", "a/", "a//b", "..", "a/../b", ".hidden", "__zarr", "a b", "zarr.json", "x.partial", "a\\b", "ä"],
)
def test_a_name_that_could_leave_the_store_or_confuse_zarr_is_refused(store: Store, name: str) -> None:
    before = files(store.root.parent)
    with pytest.raises(UsageError, match="not a name for an array"):
        declare_line(store, name)
    assert files(store.root.parent) == before


def test_an_array_cannot_lie_inside_another_nor_take_the_name_of_a_group(store: Store) -> None:
    declare_line(store, "a/b")
    with pytest.raises(UsageError, match="'a/b' is an array"):
        declare_line(store, "a/b")
    with pytest.raises(UsageError, match="'a/b' is an array"):
        declare_line(store, "a/b/c")
    with pytest.raises(UsageError, match="there is a group of that name"):
        declare_line(store, "a")
    declare_line(store, "a/bc")


@pytest.mark.parametrize(
    ("shape", "dtype", "chunk_shape"),
    [
        ((4,), "object", (2,)),
        ((4,), "bfloat16", (2,)),
        ((4,), ">f4", (2,)),
        ((4,), "float32", (2, 2)),
        ((4,), "float32", (0,)),
        ((-1,), "float32", (2,)),
    ],
)
def test_a_shape_or_dtype_that_cannot_be_stored_is_refused(
    store: Store, shape: tuple[int, ...], dtype: str, chunk_shape: tuple[int, ...]
) -> None:
    with pytest.raises(UsageError, match="array 'x': "):
        store.declare("x", shape=shape, dtype=dtype, chunk_shape=chunk_shape)


def test_a_buffer_that_does_not_match_the_chunk_is_refused_both_ways(store: Store) -> None:
    store.declare("a", shape=(4, 6), dtype="float32", chunk_shape=(2, 4))
    wrong = [
        ((0, 0), np.zeros((2, 2), np.float32)),
        ((0, 1), np.zeros((2, 4), np.float32)),
        ((0, 0), np.zeros((2, 4), np.int32)),
        ((0, 0), np.zeros((4, 2), np.float32).T),
    ]
    for index, array in wrong:
        with pytest.raises(UsageError, match="the buffer is"):
            store.write_chunk("a", index, array)
        with pytest.raises(UsageError, match="the buffer is"):
            store.read_chunk("a", index, array)
    nowhere: list[tuple[int, ...]] = [(2, 0), (0, -1), (0,), (0, 0, 0)]
    for outside in nowhere:
        with pytest.raises(UsageError, match=r"has no chunk .*: its grid of chunks is \(2, 2\)"):
            store.write_chunk("a", outside, np.zeros((2, 4), np.float32))
    store.write_chunk("a", (0, 0), np.zeros((2, 4), np.float32))
    read_only = np.zeros((2, 4), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        store.read_chunk("a", (0, 0), read_only)


def test_a_read_fills_the_buffer_of_the_caller_in_place(store: Store) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (1,), line(3))
    pool = np.zeros(12, np.float32)
    store.read_chunk("layers/0/k", (1,), pool[4:8])
    assert pool.tolist() == [0] * 4 + [3] * 4 + [0] * 4


def test_threads_may_write_different_chunks_at_once(store: Store) -> None:
    store.declare("k", shape=(64,), dtype="float32", chunk_shape=(4,))

    def work(first: int) -> None:
        for index in range(first, 16, 4):
            store.write_chunk("k", (index,), line(index))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(zarr.open_array(store.root, path="k", mode="r")[...], np.arange(16).repeat(4))
    assert store.nbytes == 256
    assert verify_chunks(store.root, store.checksums("k")) == []


def test_a_store_that_is_moved_opens_at_its_new_place(store: Store, tmp_path: Path) -> None:
    declare_line(store)
    store.write_chunk("layers/0/k", (0,), line(4))
    checksums = store.checksums("layers/0/k")
    shutil.move(store.root, tmp_path / "moved")
    out = line(0)
    Store.open(tmp_path / "moved", checksums).read_chunk("layers/0/k", (0,), out)
    assert np.array_equal(out, line(4))
