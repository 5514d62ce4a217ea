"""Signals that ask a command to end: the first one counts, and what was there before comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from engine import signals
from engine.signals import Interruption, interruptible


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[object]]:
    """What handles the signals before a test, and again after it."""
    before = [(number, signal.getsignal(number)) for number in signals.ENDING]
    yield [handler for _, handler in before]
    for number, handler in before:
        signal.signal(number, handler)


def handlers_now() -> list[object]:
    return [signal.getsignal(number) for number in signals.ENDING]


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_signal_is_an_interruption_with_the_exit_code_that_a_shell_gives_it(number: signal.Signals) -> None:
    with pytest.raises(Interruption, match=number.name) as raised, interruptible():
        os.kill(os.getpid(), number)
    assert raised.value.exit_code == 128 + number
    assert handlers_now() == [signal.SIG_IGN] * len(signals.ENDING)  # on the way out nothing disturbs


def test_without_a_signal_all_is_as_before(handlers: list[object]) -> None:
    with interruptible():
        assert handlers_now() != handlers
    assert handlers_now() == handlers


def test_a_signal_that_was_swallowed_can_be_sent_again_but_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr("engine.signals.time.monotonic", lambda: seconds[0])
    taken = []
    with interruptible():
        for later_s in (0.0, 1.0, signals.PATIENCE_S):
            seconds[0] += later_s
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                taken.append(later_s)
    assert taken == [0.0, signals.PATIENCE_S]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
