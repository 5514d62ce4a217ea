"""Standard output and error of a command: one JSON object and nothing else, readers that go away, full disks.

Invariant: to write to a standard stream of the process never fails. Progress and notes that can't be written are lost,
and nothing stops for them; of a result that can't be written the stream remembers why, and the exit code tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from engine.errors import UsageError

READER_LEFT = 141
# What a shell reports of a program that a closed pipe ended (128 + SIGPIPE).


class _Forgiving(io.FileIO):
    """A descriptor that takes everything; ``failure`` is what kept the first lost bytes from being written."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)
            if written is not None:
                return written
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            self.failure = self.failure or error
            return memoryview(data).nbytes


class Stream(io.TextIOWrapper):
    """Text to a descriptor, written as ``like`` writes it, and never an error; see `failure_of`."""

    def __init__(self, descriptor: int, like: TextIO | None = None) -> None:
        self._file = _Forgiving(descriptor, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(self._file),
            encoding=like.encoding if like is not None else "utf-8",
            errors=like.errors if like is not None else "backslashreplace",
            line_buffering=isinstance(like, io.TextIOWrapper) and like.line_buffering,
            write_through=isinstance(like, io.TextIOWrapper) and like.write_through,
        )

    @property
    def failure(self) -> OSError | None:
        """Why something could not be written; None where all was."""
        return self._file.failure


def forgive_streams() -> None:
    """Make the standard streams of the process such that to write never fails; streams that others put there stay."""
    _take_closed_descriptors()
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = Stream(1, sys.__stdout__)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = Stream(2, sys.__stderr__)


def _take_closed_descriptors() -> None:
    """Open what was closed, to fail at every write: else a file of the run would get its number, and all prints."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # opens the lowest number that is free


def failure_of(out: TextIO) -> OSError | None:
    """Write what is still buffered, and return why anything could not be written; None where all was."""
    try:
        out.flush()
    except OSError as error:
        return error
    return out.failure if isinstance(out, Stream) else None


def told(out: TextIO, code: int, advice: str = "") -> int:
    """Return the exit code of a command that ends with ``code``, with all that it had to say written to ``out`` or not.

    Where it is not, success is none any more; a code that tells something else stays.
    """
    failure = failure_of(out)
    if failure is None:
        return code
    if isinstance(failure, BrokenPipeError):  # `engine show ... | head`: nobody wants the rest
        return code or READER_LEFT
    what_to_do = advice or "send it elsewhere"
    say(f"engine: error: the result can't be written to standard output: {failure.strerror}; {what_to_do}")
    return code or UsageError.exit_code


def say(line: str) -> None:
    """Print a line on standard error; nothing stops because nobody can read it."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


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
            with Stream(kept) as alone:
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
