"""Signals that ask a command to end: each is an interruption that tidies up, and the exit code tells which it was.

Life cycle: the first signal raises `Interruption`, a KeyboardInterrupt, wherever the main thread is. Those that follow
at once are ignored, so that nothing disturbs what ends; later ones are not, since the first may have been swallowed by
a person's own code. Once the command has ended, none counts any more. What is on the disk is whole at any moment and
needs none of this: a run survives SIGKILL too.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT

PATIENCE_S = 3.0
# Many press Ctrl-C twice, and supervisors send two kinds at once; what still runs after this may be stuck.


class Interruption(KeyboardInterrupt):
    """A signal asked the process to end; its exit code is what a shell reports of a program that the signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have the signals of `ENDING` raise `Interruption`. One that is ignored, as under nohup, stays ignored."""
    last_s = -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PATIENCE_S:
            last_s = now_s
            raise Interruption(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may
        taken = [number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = {number: signal.signal(number, interrupt) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if last_s == -math.inf else signal.SIG_IGN)


def interruption(error: KeyboardInterrupt, advice: str = "") -> tuple[int, str]:
    """Return the exit code of an interruption, and what is told of it."""
    name = f" by {error}" if isinstance(error, Interruption) else ""
    code = error.exit_code if isinstance(error, Interruption) else INTERRUPTED
    return code, f"engine: interrupted{name}{f'; {advice}' if advice else ''}"
