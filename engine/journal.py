"""The journal: what a run intended and what it finished, in order, on disk.

A file of frames. Each is a length (u32, little-endian), the CRC32C of the payload (u32) and the payload, one
MessagePack array ``[tag, {field: value}]``. The first frame is the header: magic and version. No pickle, no code:
reading a journal can't run anything.

Invariant: what is read is a prefix of what was appended, or an error; never other records. A crash can only shorten
the file, or leave zeros at its end where data had not reached the disk, so

- an unfinished or damaged frame with nothing but zeros behind it is a *torn tail*: reading stops before it, and
  ``Journal.open`` cuts it off;
- any other bad frame is damage: an error with its offset.

A damaged length can make a frame in the middle look as if it reached the end of the file. It is told apart by the
payload: MessagePack delimits itself, so a torn payload never holds a complete object, whereas behind a damaged
length the complete object is still there and has the CRC that the frame states.

Life cycle: ``create``, ``append``..., ``close``; after a crash ``read_journal`` for the records and ``open`` to go
on. One process at a time: the file is locked while it is open for appending. A record is durable once a later
``append(..., sync=True)`` returns; unsynced appends cost no disk wait, and survive a killed process though not a
power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, get_args, get_origin, get_type_hints

import google_crc32c
import msgpack

from engine.atomic import sync_directory
from engine.errors import RunDirectoryError, StageFailedError, UsageError
from engine.units import MIB

MAGIC = "longstraw-journal"
VERSION = 2
MAX_PAYLOAD_BYTES = MIB
# Records are scalars and names; tensors are in the store. The checksums of 10,000 chunks fit. Without a cap a damaged
# length could ask for 4 GiB.
MAX_DEPTH = 32
# Of nested lists and dicts in a record, far more than results need; keeps checking clear of the recursion limit.
_FRAME_HEAD = struct.Struct("<II")


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """The plan of this run: resume refuses another one. ``recipe`` is what it takes to build the plan again."""

    plan: str
    fingerprint: str
    settings: dict[str, object]
    choices: dict[str, object]
    budget_bytes: dict[str, int]
    code_version: str
    recipe: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class StageIntent:
    """A stage is about to run; without its commit, nothing it wrote counts."""

    stage: str
    key: str


@dataclass(frozen=True, kw_only=True)
class StageCommit:
    """A stage is done, and so is what `SpillCommit` records before this one say it wrote.

    The bytes are by tier, as planned while the stage ran and as measured.
    """

    stage: str
    key: str
    planned_peak_bytes: dict[str, int]
    measured_peak_bytes: dict[str, int]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class SpillCommit:
    """Chunks of a Value that were written to a tier, by chunk key with their CRC32C."""

    value: str
    tier: str
    checksums: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class KeptFile:
    """A file in the results that a resumed run finds again and never makes twice, about to be written.

    A file that is written again has several records, and may be any of them.
    """

    path: str
    nbytes: int
    crc32c: int


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """A result a person asked for: a metric, the path of a checkpoint."""

    name: str
    payload: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class RunFinished:
    """The run is complete; nothing is left to resume."""

    results: dict[str, object]


Record = PlanRecord | StageIntent | StageCommit | SpillCommit | KeptFile | ResultRecord | RunFinished

_CLASS_BY_TAG: dict[str, type[Record]] = {
    "plan": PlanRecord,
    "stage_intent": StageIntent,
    "stage_commit": StageCommit,
    "spill_commit": SpillCommit,
    "kept_file": KeptFile,
    "result": ResultRecord,
    "run_finished": RunFinished,
}
_TAG_BY_CLASS = {cls: tag for tag, cls in _CLASS_BY_TAG.items()}
_TYPES_BY_TAG: dict[str, dict[str, Any]] = {tag: get_type_hints(cls) for tag, cls in _CLASS_BY_TAG.items()}


class Journal:
    """A journal open for appending, by this process alone."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self._path = path
        self._place = path.absolute()
        self._fd = fd
        self._num_bytes = num_bytes
        self._failed = False

    @classmethod
    def create(cls, path: Path) -> Journal:
        """Make a new journal at ``path``, durable with its header before this returns.

        Raises:
            UsageError: there is a file at ``path`` already, or the file system has no locks.
            OSError: the file could not be written; nothing is left of it.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError as error:
            raise UsageError(f"journal {path} exists already; resume that run or name another directory") from error
        journal = cls(path, fd, 0)
        try:
            with _closed_on_error(journal):
                _lock(path, fd)
                journal._write_header()
        except BaseException:
            path.unlink()
            raise
        return journal

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open the journal at ``path`` to append to it, after cutting off a torn tail.

        Raises:
            RunDirectoryError: there is no journal, or it is damaged; it was not changed.
            UsageError: another process has it open, or the file system has no locks.
        """
        journal = cls(path, _open_locked(path), 0)
        with _closed_on_error(journal):
            _, journal._num_bytes = read_journal(path)
            if journal._num_bytes < os.fstat(journal._fd).st_size:
                os.ftruncate(journal._fd, journal._num_bytes)
                os.fsync(journal._fd)
            if journal._num_bytes == 0:
                journal._write_header()
        return journal

    @staticmethod
    def check_free(path: Path) -> None:
        """Raise now what `open` will raise, short of damage: it is not there, or another process has it."""
        os.close(_open_locked(path))

    @property
    def path(self) -> Path:
        """Where the journal is."""
        return self._path

    @property
    def num_bytes(self) -> int:
        """How long the journal is, header included."""
        return self._num_bytes

    def is_in_place(self) -> bool:
        """Return whether this is the file at its path still, and was not moved or removed meanwhile."""
        try:
            return os.path.samestat(os.stat(self._place), os.fstat(self._fd))
        except OSError:
            return False

    def check_in_place(self) -> None:
        """Raise RunDirectoryError unless this is the file at its path still."""
        if not self.is_in_place():
            raise RunDirectoryError(
                f"run directory {self._path.parent} was moved, removed or emptied while it was run: its journal is not "
                f"at {self._path} any more; if it was moved, resume it where it is now, else execute again"
            )

    def append(self, record: Record, sync: bool = False) -> None:
        """Append ``record``; with ``sync`` it and all before it are on disk when this returns.

        Raises:
            UsageError: the record can't be written so that it reads back equal, or is longer than a frame may be.
            RunDirectoryError: the journal is not at its path any more.
            StageFailedError: the disk refused; the journal ends with the record before this one.
        """
        frame = _encode_frame(record)
        if self._failed:
            raise StageFailedError(f"journal {self._path} failed earlier and takes no more records; resume the run")
        self.check_in_place()
        try:
            self._write(frame)
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            self._failed = True  # after a failed fsync the kernel may have dropped the data: only reading tells
            raise StageFailedError(
                f"can't append {type(record).__name__} ({len(frame)} bytes) to journal {self._path}: "
                f"{error.strerror}; mend that, then `engine resume {self._path.parent}`"
            ) from error

    def close(self) -> None:
        """Sync and close; does nothing the second time.

        Raises:
            OSError: the last unsynced records could not be made durable.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _write_header(self) -> None:
        self._write(_HEADER_FRAME)
        os.fsync(self._fd)
        sync_directory(self._path.parent)

    def _write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:  # later frames must not follow half a frame, not even after Ctrl-C
            self._failed = True
            os.ftruncate(self._fd, self._num_bytes)
            self._failed = False
            raise
        self._num_bytes += len(frame)


def read_journal(path: Path) -> tuple[list[Record], int]:
    """Return the records of the journal at ``path`` and the length in bytes of what is valid; changes nothing.

    A torn tail is left out of both. A journal torn within its header has no records and 0 valid bytes.

    Raises:
        RunDirectoryError: there is no journal, it is of another version, or a frame is damaged (with its offset).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"can't read the journal {path}: {error.strerror}") from error
    if len(data) < len(_HEADER_FRAME) and _HEADER_FRAME.startswith(data):
        return [], 0
    records: list[Record] = []
    offset = _check_header(path, data)
    while offset < len(data) and (payload := _read_payload(path, data, offset)) is not None:
        records.append(_decode(path, offset, payload))
        offset += _FRAME_HEAD.size + len(payload)
    return records, offset


def _frame(content: list[object]) -> bytes:
    payload: bytes = msgpack.packb(content, use_bin_type=True, strict_types=True)
    return _FRAME_HEAD.pack(len(payload), google_crc32c.value(payload)) + payload


_HEADER_FRAME = _frame(["header", {"magic": MAGIC, "version": VERSION}])


def check_record(record: Record) -> None:
    """Raise UsageError if ``record`` can't be written to a journal."""
    _encode_frame(record)


def _encode_frame(record: Record) -> bytes:
    tag = _TAG_BY_CLASS.get(type(record))
    if tag is None:
        raise UsageError(f"not a journal record: {record!r}; one of {sorted(cls.__name__ for cls in _TAG_BY_CLASS)}")
    content = {field.name: getattr(record, field.name) for field in fields(record)}
    if problem := _find_problem(tag, content):
        raise UsageError(f"can't write {problem}")
    try:
        frame = _frame([tag, content])
    except (ValueError, OverflowError) as error:  # an int beyond 64 bits, a str that is not Unicode
        raise UsageError(f"can't write {type(record).__name__}: {error}") from error
    if len(frame) - _FRAME_HEAD.size > MAX_PAYLOAD_BYTES:
        raise UsageError(
            f"{type(record).__name__} takes {len(frame) - _FRAME_HEAD.size} bytes, a journal record at most "
            f"{MAX_PAYLOAD_BYTES}; put tensors in the store and write several records for many chunks"
        )
    return frame


def _read_payload(path: Path, data: bytes, offset: int) -> bytes | None:
    """Return the payload of the frame at ``offset``, or None if the frame is a torn tail."""
    start = offset + _FRAME_HEAD.size
    if len(data) < start:
        return None
    length, crc = _FRAME_HEAD.unpack_from(data, offset)
    payload = data[start : start + length]
    in_range = 0 < length <= MAX_PAYLOAD_BYTES
    if in_range and len(payload) == length and google_crc32c.value(payload) == crc:
        return payload
    if not data[offset:].strip(b"\0"):
        return None
    if not in_range:
        raise _damaged(path, offset, f"its length is {length} bytes, outside 1 to {MAX_PAYLOAD_BYTES}")
    if data[start + length :].strip(b"\0"):
        raise _damaged(path, offset, f"its CRC32C is not {crc:#010x} and other records follow")
    if _holds_object(data[start:], crc):
        raise _damaged(path, offset, f"its length of {length} bytes is not that of its content")
    return None


def _holds_object(data: bytes, crc: int) -> bool:
    """Return whether ``data`` starts with one complete MessagePack object whose CRC32C is ``crc``."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.OutOfData):
        return False
    return bool(google_crc32c.value(data[: unpacker.tell()]) == crc)


def _check_header(path: Path, data: bytes) -> int:
    """Return the offset of the first record."""
    if data.startswith(_HEADER_FRAME):
        return len(_HEADER_FRAME)
    payload = _read_payload(path, data, 0)
    match _unpack(payload) if payload is not None else None:
        case ["header", {"magic": str(magic), "version": version}] if magic == MAGIC:
            raise RunDirectoryError(
                f"journal {path} has version {version!r}, this engine reads {VERSION}; "
                f"resume the run with the engine that started it"
            )
    raise _damaged(path, 0, "it is not the header of a journal")


def _decode(path: Path, offset: int, payload: bytes) -> Record:
    match _unpack(payload):
        case [str(tag), dict(content)]:
            if problem := _find_problem(tag, content):
                raise _damaged(path, offset, problem)
            return _CLASS_BY_TAG[tag](**content)
    raise _damaged(path, offset, "its content is not a tag with fields")


def _unpack(payload: bytes) -> object:
    """Return what ``payload`` holds, or None if it is no MessagePack."""
    try:
        content: object = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, OverflowError):
        return None
    return content


def _find_problem(tag: str, content: dict[str, object]) -> str | None:
    """Return what keeps ``content`` from being the fields of a record with ``tag``, or None."""
    types = _TYPES_BY_TAG.get(tag)
    if types is None:
        return f"record of unknown kind {tag!r}"
    name = _CLASS_BY_TAG[tag].__name__
    if content.keys() != types.keys():
        unknown, missing = sorted(map(str, content.keys() - types.keys())), sorted(types.keys() - content.keys())
        return f"{name}: unknown fields {unknown}, missing fields {missing}"
    for field, wanted in types.items():
        if not _fits(content[field], wanted):
            wanted_text = wanted.__name__ if isinstance(wanted, type) and not get_args(wanted) else str(wanted)
            return f"{name}: {field}={_shorten(content[field])} is not {wanted_text} of plain values"
    return None


def _fits(value: object, wanted: Any, depth: int = 0) -> bool:
    """Return whether ``value`` has type ``wanted`` and comes back from MessagePack as it went in."""
    if depth > MAX_DEPTH:
        return False
    if get_origin(wanted) is dict:
        item_type = get_args(wanted)[1]
        return type(value) is dict and all(type(k) is str and _fits(v, item_type, depth + 1) for k, v in value.items())
    if wanted is not object:
        return type(value) is wanted or (wanted is float and type(value) is int)
    if type(value) is dict:
        return _fits(value, dict[str, object], depth)
    if type(value) is list:
        return all(_fits(item, object, depth + 1) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _damaged(path: Path, offset: int, problem: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"journal {path} is damaged at byte {offset}: {problem}; restore the file from a copy, or start a new run"
    )


def _open_locked(path: Path) -> int:
    """Return a descriptor of the journal at ``path``, to append to, which no other process has."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        raise RunDirectoryError(f"can't open the journal {path}: {error.strerror}") from error
    try:
        _lock(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(path: Path, fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another process is running {path.parent}; wait for it or end it") from error
    except OSError as error:
        raise UsageError(
            f"can't lock {path}: {error.strerror}; two processes could write one run, so use a file system with locks"
        ) from error


@contextlib.contextmanager
def _closed_on_error(journal: Journal) -> Iterator[None]:
    """Let go of a journal that could not be opened to the end."""
    try:
        yield
    except BaseException:
        os.close(journal._fd)
        journal._fd = -1
        raise
