"""Rollouts files: JSON Lines or Parquet, one group a line, checked before any work starts.

Lines count from 1, as editors do. What a line may hold is `stages.group_parser`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from stages.group_parser import parse_group
from stages.groups import Group

_PARQUET_ROWS = 16
# Rows decoded at once: prompts may have millions of tokens, so a file is never held as Python objects as a whole.


def read_rollouts(path: str | Path, *, tokenizer: Any, vocab_size: int, append_eos: bool = False) -> tuple[Group, ...]:
    """Return all groups of a rollouts file, one a line (``.jsonl``) or one a row (``.parquet``).

    Blank lines are skipped. The arguments are those of :func:`parse_group`.

    Raises:
        UsageError: the file is missing, empty or of another kind, a line is not a JSON object, or a group is refused.
    """
    path = Path(path)
    readers = {".jsonl": _json_lines, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise UsageError(f"rollouts file {str(path)!r} ends in {path.suffix!r}; give JSON Lines (.jsonl) or .parquet")
    groups: list[Group] = []
    try:
        for where, record in readers[path.suffix](path):
            groups.append(
                parse_group(
                    record,
                    where=where,
                    tokenizer=tokenizer,
                    vocab_size=vocab_size,
                    append_eos=append_eos,
                    group=len(groups),
                )
            )
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"can't read the rollouts file {str(path)!r}: {reason}; check the path") from error
    if not groups:
        raise UsageError(f"rollouts file {str(path)!r} is empty; write one group a line: {{'prompt': ..., ...}}")
    return tuple(groups)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path.name} line {number}"
            if line.strip():
                yield where, _json_object(line, where)


def _json_object(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UsageError(f"{where}: key {twice!r} appears more than once in one object; keep one of them")
        return record

    try:
        return json.loads(text, object_pairs_hook=unique)
    except UsageError:
        raise
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON: {error.msg} at column {error.colno}; write one whole JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON that can be read: {error}; write one JSON object a line") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"reading {str(path)!r} needs the package pyarrow; run `pip install pyarrow`, or write JSON Lines (.jsonl)"
        ) from error
    number = 0
    with path.open("rb") as file:
        try:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=_PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path.name} row {number}", record
        except pyarrow.ArrowException as error:
            raise UsageError(
                f"{str(path)!r} is not a Parquet file that can be read: {error}; write it again"
            ) from error
