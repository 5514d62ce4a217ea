"""The journal: what is read is a prefix of what was appended, or an error."""

from __future__ import annotations

import os
import pickle
import re
import struct
from dataclasses import fields
from pathlib import Path

import google_crc32c
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import journal
from engine.errors import RunDirectoryError, StageFailedError, UsageError
from engine.journal import (
    MAX_PAYLOAD_BYTES,
    Journal,
    KeptFile,
    PlanRecord,
    Record,
    ResultRecord,
    RunFinished,
    SpillCommit,
    StageCommit,
    StageIntent,
    read_journal,
)

same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)

names = st.text(max_size=12)
sizes = st.dictionaries(names, st.integers(-(2**63), 2**64 - 1), max_size=3)
plain = st.dictionaries(
    names,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | names,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        PlanRecord,
        plan=names,
        fingerprint=names,
        settings=plain,
        choices=plain,
        budget_bytes=sizes,
        code_version=names,
        recipe=plain,
    ),
    st.builds(StageIntent, stage=names, key=names),
    st.builds(
        StageCommit,
        stage=names,
        key=names,
        planned_peak_bytes=sizes,
        measured_peak_bytes=sizes,
        wall_s=st.floats(allow_nan=False),
    ),
    st.builds(SpillCommit, value=names, tier=names, checksums=sizes),
    st.builds(KeptFile, path=names, nbytes=st.integers(0, 2**40), crc32c=st.integers(0, 2**32 - 1)),
    st.builds(ResultRecord, name=names, payload=plain),
    st.builds(RunFinished, results=plain),
)

EXAMPLE: list[Record] = [
    PlanRecord(
        plan="p",
        fingerprint="f",
        settings={"a": 1},
        choices={},
        budget_bytes={"device": 9},
        code_version="1",
        recipe={},
    ),
    StageIntent(stage="prefill/0", key="k"),
    StageCommit(
        stage="prefill/0", key="k", planned_peak_bytes={"device": 6}, measured_peak_bytes={"device": 5}, wall_s=0.5
    ),
    RunFinished(results={"loss": -1.5}),
]


def write(path: Path, content: list[Record]) -> list[int]:
    """Write a journal of ``content`` and return the offset at which each frame ends, the header's first."""
    path.unlink(missing_ok=True)
    with Journal.create(path) as journal:
        ends = [journal.num_bytes]
        for record in content:
            journal.append(record)
            ends.append(journal.num_bytes)
    return ends


def frame(payload: bytes) -> bytes:
    return struct.pack("<II", len(payload), google_crc32c.value(payload)) + payload


def append_raw(path: Path, payload: bytes) -> int:
    offset = path.stat().st_size
    with open(path, "ab") as file:
        file.write(frame(payload))
    return offset


@given(content=st.lists(records, max_size=6))
@same_directory
def test_any_sequence_of_records_reads_back_equal(tmp_path: Path, content: list[Record]) -> None:
    path = tmp_path / "journal"
    ends = write(path, content)
    assert read_journal(path) == (content, ends[-1])
    assert path.stat().st_size == ends[-1]


@given(content=st.lists(records, max_size=3))
@same_directory
def test_a_file_cut_at_any_byte_reads_as_the_records_before_the_cut(tmp_path: Path, content: list[Record]) -> None:
    path = tmp_path / "journal"
    ends = write(path, content)
    for cut in range(ends[-1], -1, -1):
        os.truncate(path, cut)
        whole = [end for end in ends if end <= cut]
        assert read_journal(path) == (content[: max(0, len(whole) - 1)], max(whole, default=0))


def test_a_file_cut_at_any_byte_can_be_opened_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, EXAMPLE)
    data = path.read_bytes()
    for cut in range(ends[-1] + 1):
        path.write_bytes(data[:cut])
        kept = sum(end <= cut for end in ends[1:])
        with Journal.open(path) as journal:
            journal.append(StageIntent(stage="next", key="n"))
        assert read_journal(path)[0] == [*EXAMPLE[:kept], StageIntent(stage="next", key="n")]


def test_any_flipped_bit_before_the_last_frame_is_an_error_and_never_other_records(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, EXAMPLE)
    data = path.read_bytes()
    for bit in range(8 * ends[-2]):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        start = max((end for end in ends if end <= bit // 8), default=0)
        with pytest.raises(RunDirectoryError, match=f"damaged at byte {start}:|has version"):
            read_journal(path)


@given(content=st.lists(records, min_size=2, max_size=5), data=st.data())
@same_directory
def test_any_damaged_byte_before_the_last_frame_is_an_error(
    tmp_path: Path, content: list[Record], data: st.DataObject
) -> None:
    path = tmp_path / "journal"
    ends = write(path, content)
    damaged = bytearray(path.read_bytes())
    damaged[data.draw(st.integers(0, ends[-2] - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    with pytest.raises(RunDirectoryError):
        read_journal(path)


def test_a_flipped_bit_in_the_last_frame_loses_at_most_that_record(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, EXAMPLE)
    data = path.read_bytes()
    for bit in range(8 * ends[-2], 8 * ends[-1]):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if bit < 8 * (ends[-2] + 4):  # a length that no append could have written
            with pytest.raises(RunDirectoryError, match=f"damaged at byte {ends[-2]}:"):
                read_journal(path)
        else:
            assert read_journal(path) == (EXAMPLE[:-1], ends[-2])


@pytest.mark.parametrize("num_zeros", [1, 7, 8, 9, 4096])
def test_zeros_that_a_power_cut_left_at_the_end_are_a_torn_tail(tmp_path: Path, num_zeros: int) -> None:
    path = tmp_path / "journal"
    ends = write(path, EXAMPLE)
    data = path.read_bytes()
    for length in (ends[-1], ends[-2] + 20, ends[-2] + 3):
        path.write_bytes(data[:length] + bytes(num_zeros))
        whole = [end for end in ends if end <= length]
        assert read_journal(path) == (EXAMPLE[: len(whole) - 1], whole[-1])


def test_a_damaged_journal_is_not_changed_by_opening_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    ends = write(path, EXAMPLE)
    damaged = bytearray(path.read_bytes())
    damaged[ends[1] + 12] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(RunDirectoryError, match=f"{path} is damaged at byte {ends[1]}: its CRC32C is not"):
        Journal.open(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (["stage_intent", {"stage": "s", "key": "k", "more": 1}], "unknown fields ['more']"),
        (["stage_intent", {"stage": "s"}], "missing fields ['key']"),
        (["stage_intent", {"stage": "s", "key": 3}], "StageIntent: key=3 is not str"),
        (["spill_commit", {"value": "v", "tier": "disk", "checksums": {"c": "x"}}], "is not dict[str, int]"),
        (["spill_commit", {"value": "v", "tier": "disk", "checksums": {"c": True}}], "is not dict[str, int]"),
        (["result", {"name": "n", "payload": {"p": b"bytes"}}], "ResultRecord: payload="),
        (["stage_intend", {}], "record of unknown kind 'stage_intend'"),
        (["header", {"magic": "longstraw-journal", "version": 2}], "record of unknown kind 'header'"),
        ({"stage": "s"}, "not a tag with fields"),
        (None, "not a tag with fields"),
    ],
)
def test_a_frame_that_is_no_record_is_an_error_that_names_the_offset(
    tmp_path: Path, content: object, problem: str
) -> None:
    path = tmp_path / "journal"
    write(path, EXAMPLE)
    offset = append_raw(path, msgpack.packb(content))
    with pytest.raises(RunDirectoryError) as caught:
        read_journal(path)
    assert f"damaged at byte {offset}: " in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("payload", [pickle.dumps({"a": 1}), b"\xc1", b"\x90\x90", b"\x91" * 100_000 + b"\x90"])
def test_a_payload_that_is_not_one_messagepack_object_is_an_error(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "journal"
    write(path, [])
    append_raw(path, payload)
    with pytest.raises(RunDirectoryError, match="not a tag with fields"):
        read_journal(path)


def test_a_length_beyond_the_cap_is_an_error_and_not_a_huge_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    [end] = write(path, [])
    with open(path, "ab") as file:
        file.write(struct.pack("<II", 2**32 - 1, 0) + b"x")
    with pytest.raises(RunDirectoryError, match=f"damaged at byte {end}: its length is 4294967295 bytes"):
        read_journal(path)


def test_a_journal_of_another_version_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(frame(msgpack.packb(["header", {"magic": "longstraw-journal", "version": 3}])))
    with pytest.raises(RunDirectoryError, match="has version 3, this engine reads 2"):
        read_journal(path)


@pytest.mark.parametrize("data", [b"#!/bin/sh\n", b"{}", bytes(100), frame(msgpack.packb(["header", {}]))])
def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(RunDirectoryError, match=r"damaged at byte 0: .*(length|not the header of a journal)"):
        read_journal(path)


def test_a_missing_journal_is_an_error_of_the_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="No such file"):
        read_journal(tmp_path / "journal")
    with pytest.raises(RunDirectoryError, match="No such file"):
        Journal.open(tmp_path / "journal")


def test_creating_over_an_existing_journal_is_refused_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, EXAMPLE)
    with pytest.raises(UsageError, match="exists already"):
        Journal.create(path)
    assert read_journal(path)[0] == EXAMPLE


def test_one_journal_is_open_for_appending_only_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path), pytest.raises(UsageError, match="another process is running"):
        Journal.open(path)
    Journal.open(path).close()


def test_whether_a_journal_is_free_is_told_without_opening_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal.create(path), pytest.raises(UsageError, match="another process is running"):
        Journal.check_free(path)
    data = path.read_bytes() + b"torn"
    path.write_bytes(data)
    Journal.check_free(path)
    assert path.read_bytes() == data
    with pytest.raises(RunDirectoryError, match=r"can't open the journal .*: No such file"):
        Journal.check_free(tmp_path / "gone")


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({"p": (1, 2)}, "payload={'p': (1, 2)}"),
        ({"p": {1: 2}}, "payload="),
        ({"p": object()}, "payload="),
        ({"p": b"x"}, "payload="),
        ({"p": 2**64}, "ResultRecord"),
        ({"p": "\ud800"}, "ResultRecord"),
        ({"p": "x" * MAX_PAYLOAD_BYTES}, f"at most {MAX_PAYLOAD_BYTES}"),
    ],
)
def test_a_record_that_would_not_read_back_equal_is_refused_before_anything_is_written(
    tmp_path: Path, payload: dict[str, object], problem: str
) -> None:
    path = tmp_path / "journal"
    with Journal.create(path) as journal:
        with pytest.raises(UsageError) as caught:
            journal.append(ResultRecord(name="n", payload=payload))
        assert problem in str(caught.value)
        journal.append(EXAMPLE[1])
    assert read_journal(path)[0] == [EXAMPLE[1]]


def test_a_list_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    with Journal.create(tmp_path / "journal") as journal, pytest.raises(UsageError, match="payload="):
        journal.append(ResultRecord(name="n", payload={"p": loop}))


def test_a_record_as_long_as_the_cap_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    overhead = len(msgpack.packb(["result", {"name": "n", "payload": {"p": "x" * 2**16}}])) - 2**16
    record = ResultRecord(name="n", payload={"p": "x" * (MAX_PAYLOAD_BYTES - overhead)})
    write(path, [record])
    assert read_journal(path)[0] == [record]


def test_a_disk_that_fills_up_within_a_frame_leaves_the_records_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    real_write = os.write

    def fill_up(fd: int, data: memoryview) -> int:
        if len(data) > 10:
            return real_write(fd, data[:10])
        raise OSError(28, "No space left on device")

    with Journal.create(path) as journal:
        journal.append(EXAMPLE[0])
        monkeypatch.setattr(os, "write", fill_up)
        with pytest.raises(StageFailedError, match=r"can't append StageIntent .* No space left on device"):
            journal.append(EXAMPLE[1])
        monkeypatch.undo()
        with pytest.raises(StageFailedError, match="takes no more records"):
            journal.append(EXAMPLE[1])
    assert read_journal(path) == (EXAMPLE[:1], path.stat().st_size)


def test_an_interrupt_within_a_frame_leaves_a_journal_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    real_write = os.write

    def interrupt(fd: int, data: memoryview) -> int:
        real_write(fd, data[:10])
        raise KeyboardInterrupt

    with Journal.create(path) as journal:
        monkeypatch.setattr(os, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            journal.append(EXAMPLE[0])
        monkeypatch.undo()
        journal.append(EXAMPLE[1])
    assert read_journal(path)[0] == [EXAMPLE[1]]


def test_only_records_that_ask_for_it_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        synced.append(fd)
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with Journal.create(tmp_path / "journal") as journal:
        assert len(synced) == 2  # the file and its directory
        journal.append(EXAMPLE[1])
        assert len(synced) == 2
        journal.append(EXAMPLE[2], sync=True)
        assert len(synced) == 3


def test_a_failed_sync_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with Journal.create(tmp_path / "journal") as journal:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StageFailedError, match="Input/output error"):
            journal.append(EXAMPLE[1], sync=True)
        monkeypatch.undo()
        with pytest.raises(StageFailedError, match="takes no more records"):
            journal.append(EXAMPLE[1])


def test_a_journal_that_could_not_be_created_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        Journal.create(tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_takes_no_record_once_it_is_not_at_its_path_any_more(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Journal.create(tmp_path / "run" / "journal") as journal:
        journal.append(EXAMPLE[0])
        os.rename(tmp_path / "run", tmp_path / "moved")
        with pytest.raises(RunDirectoryError, match=r"run was moved, removed or emptied while it was run"):
            journal.append(EXAMPLE[1])
        os.rename(tmp_path / "moved", tmp_path / "run")
        journal.append(EXAMPLE[2])
    assert read_journal(tmp_path / "run" / "journal")[0] == [EXAMPLE[0], EXAMPLE[2]]


def test_a_journal_is_in_its_place_from_whatever_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Journal.create(Path("journal")) as journal:
        monkeypatch.chdir("/")
        assert journal.is_in_place()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "journal")
    journal.close()
    journal.close()


def test_the_documented_journal_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run-directory.md").read_text()
    assert f'"magic": "{journal.MAGIC}", "version": {journal.VERSION}' in page
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (`\w+`(?:, `\w+`)*) \|$", page, re.MULTILINE)
    documented = {tag: re.findall(r"\w+", names) for tag, names in rows}
    assert documented == {tag: [item.name for item in fields(cls)] for tag, cls in journal._CLASS_BY_TAG.items()}
