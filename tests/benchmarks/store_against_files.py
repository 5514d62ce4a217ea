"""How fast the store is beside plain files of the same size: ratios, as medians of interleaved rounds.

    python tests/benchmarks/store_against_files.py [--folder DIR] [--rounds N] [--total-mib N] [--sizes-kib ...]

Every round writes and reads the same bytes in every way, in turn, so that a disk that drifts drifts for all. Plain
files are written with ``os.write`` into a new file and read with ``readinto`` into a buffer that exists: no checksum,
no space reserved. *Durable* is with ``fdatasync`` of each file and ``fsync`` of the folder on both sides; plain files
are synced in both orders, each once it is written or all once all are written, and the faster order counts.
*Replaced* overwrites what is there; plain files are overwritten in place. *Cold* reads come after the page cache was
told to forget the files, *warm* ones from it. Ratios are the plain time divided by the store's: 1 is as fast as plain
files.

The script fails if durable writes have less than 0.85 of the plain files' speed, or cold reads less than 0.75, at any
size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.atomic import sync_directory
from engine.store import Store
from engine.units import KIB, MIB

Array = np.ndarray[Any, np.dtype[Any]]
Work = Callable[[], None]

WAYS = ("write", "replace", "durable write", "warm read", "cold read")
DURABLE = WAYS[2]
LEAST = {DURABLE: 0.85, "cold read": 0.75}
MOST_PIECES = 256
# More small files measure the file system's folders.
SETTLE_S = 0.05
# Between two ways, so that the one's write-back is not in the other's time.


class Sync(StrEnum):
    """When plain files are synced; with any of it their folder is, at the end."""

    NEVER = auto()
    EACH = auto()
    AFTER_ALL = auto()


def plain_write(paths: list[Path], data: Array, *, flags: int, sync: Sync = Sync.NEVER) -> None:
    view = data.data
    for path in paths:
        fd = os.open(path, os.O_WRONLY | flags, 0o666)
        try:
            rest = view
            while rest:
                rest = rest[os.write(fd, rest) :]
            if sync is Sync.EACH:
                os.fdatasync(fd)
        finally:
            os.close(fd)
    if sync is Sync.AFTER_ALL:
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.close(fd)
    if sync is not Sync.NEVER:
        sync_directory(paths[0].parent)


def plain_read(paths: list[Path], out: Array) -> None:
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            rest = out.data
            while rest and (num_read := file.readinto(rest)):
                rest = rest[num_read:]


def forget(paths: list[Path]) -> None:
    """Put the files on disk and out of the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Work) -> float:
    time.sleep(SETTLE_S)
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Contest:
    """One piece size: the store and plain files take turns."""

    def __init__(self, folder: Path, piece_bytes: int, num_pieces: int) -> None:
        self.folder, self.num_pieces = folder, num_pieces
        self.data = np.random.default_rng(0).integers(0, 256, piece_bytes, np.uint8)
        self.out = np.zeros_like(self.data)
        self.spec = {"shape": (piece_bytes * num_pieces,), "dtype": "uint8", "chunk_shape": (piece_bytes,)}

    def _store(self) -> Store:
        root = self.folder / "store"
        shutil.rmtree(root, ignore_errors=True)
        store = Store.create(root)
        store.declare("a", **self.spec)  # type: ignore[arg-type]
        store.sync("a")  # so that the folder is there for good on both sides
        return store

    def _files(self) -> list[Path]:
        root = self.folder / "plain"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        sync_directory(self.folder)
        return [root / str(index) for index in range(self.num_pieces)]

    def _write(self, store: Store, *, sync: bool = False, replace: bool = False) -> None:
        for index in range(self.num_pieces):
            store.write_chunk("a", (index,), self.data, replace=replace)
        if sync:
            store.sync("a")

    def _read(self, store: Store) -> None:
        for index in range(self.num_pieces):
            store.read_chunk("a", (index,), self.out)

    def plain(self) -> dict[str, float]:
        new = os.O_CREAT | os.O_EXCL
        seconds: dict[str, float] = {}
        for sync in (Sync.EACH, Sync.AFTER_ALL):
            paths = self._files()
            seconds[sync] = timed(partial(plain_write, paths, self.data, flags=new, sync=sync))
        paths = self._files()
        seconds["write"] = timed(lambda: plain_write(paths, self.data, flags=new))
        seconds["replace"] = timed(lambda: plain_write(paths, self.data, flags=0))
        seconds["warm read"] = timed(lambda: plain_read(paths, self.out))
        forget(paths)
        seconds["cold read"] = timed(lambda: plain_read(paths, self.out))
        return seconds

    def ours(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        store = self._store()
        seconds[DURABLE] = timed(lambda: self._write(store, sync=True))
        again = self._store()
        seconds["write"] = timed(lambda: self._write(again))
        seconds["replace"] = timed(lambda: self._write(again, replace=True))
        seconds["warm read"] = timed(lambda: self._read(again))
        forget([again.root / key for key in again.checksums("a")])
        seconds["cold read"] = timed(lambda: self._read(again))
        return seconds


def compare(folder: Path, piece_bytes: int, num_pieces: int, rounds: int) -> bool:
    """Print how fast both sides are at one piece size, and return whether the store is fast enough."""
    contest = Contest(folder, piece_bytes, num_pieces)
    contest.plain(), contest.ours()  # the first of each pays for what later ones find warm
    plain, ours = [], []
    for number in range(rounds):
        first, second = (contest.plain, contest.ours) if number % 2 else (contest.ours, contest.plain)
        pair = {first: first(), second: second()}
        plain.append(pair[contest.plain])
        ours.append(pair[contest.ours])
    faster = min((Sync.EACH, Sync.AFTER_ALL), key=lambda sync: statistics.median(seconds[sync] for seconds in plain))
    for seconds in plain:
        seconds[DURABLE] = seconds[faster]
    enough = True
    for way in WAYS:
        mine, theirs = (statistics.median(seconds[way] for seconds in side) for side in (ours, plain))
        ratio = statistics.median(p[way] / o[way] for p, o in zip(plain, ours, strict=True))
        total_bytes = piece_bytes * num_pieces
        print(
            f"{piece_bytes / MIB:6.3g} MiB  {way:13s}  plain {total_bytes / theirs / 1e9:6.2f} GB/s  "
            f"store {total_bytes / mine / 1e9:6.2f} GB/s  ratio {ratio:.2f}  "
            f"({(mine - theirs) / num_pieces * 1e6:+.0f} us a piece)",
            flush=True,
        )
        enough = enough and ratio >= LEAST.get(way, 0.0)
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: the temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--total-mib", type=int, default=128, help="bytes a way and round")
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[128, 1024, 4096, 16384])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        enough = [
            compare(
                Path(folder), size * KIB, min(MOST_PIECES, arguments.total_mib * MIB // (size * KIB)), arguments.rounds
            )
            for size in arguments.sizes_kib
        ]
    return 0 if all(enough) else 1


if __name__ == "__main__":
    sys.exit(main())
