"""Standard output of a command: one JSON object and nothing else, and readers that go away."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def only_the_object(out: TextIO) -> Iterator[TextIO]:
    """Yield a way to standard output that nothing else has: whatever else is written there goes to standard error.

    Prints of plans and stages are redirected, and so is file descriptor 1 itself, which libraries and their child
    processes write to.
    """
    with contextlib.redirect_stdout(sys.stderr):
        if not _is_descriptor_1(out):
            yield out
            return
        out.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            with open(kept, "w", encoding="utf-8", closefd=False) as alone:
                yield alone
        finally:
            ctypes.CDLL(None).fflush(None)  # what C has buffered belongs to standard error too
            os.dup2(kept, 1)
            os.close(kept)


def _is_descriptor_1(out: TextIO) -> bool:
    try:
        return out.fileno() == 1
    except (OSError, ValueError):  # a stream of its own, which knows no descriptor
        return False


def discard(out: TextIO) -> None:
    """Let what is still buffered go nowhere, so that the end of the process does not fail at it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)


def flush_or_discard(out: TextIO) -> None:
    """Write what is still buffered, or let it go nowhere if nobody reads it."""
    try:
        out.flush()
    except (OSError, ValueError):
        discard(out)
