"""Every error that a person can meet, in one place.

An error says what happened, with the values, and what to do next. Each class knows the exit code that the
command line returns for it, so that no other part of the engine needs a table of codes. User errors also
inherit the builtin type that a library caller would expect to catch.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns.

    One that is of no class below means that the engine is at odds with itself while a stage runs. Exit code 1 is that
    of an audit out of its tolerance and of nothing else.
    """

    exit_code = 5


def one_line(error: BaseException) -> str:
    """Return an error that is not one of ours as the part of a message: its kind, and what it says, on one line."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class UsageError(EngineError, ValueError):
    """A wrong argument, option or input file: nothing was started and nothing was written."""

    exit_code = 2


class PlanError(UsageError):
    """A plan that is not a plan: a cycle, two stages of one name, a Value read before it is written."""


class UnsupportedModelError(UsageError):
    """A model that the adapters can't evaluate exactly, refused by name."""


class DoesNotFitError(EngineError):
    """The plan does not fit the budget; carries what the command line prints as JSON."""

    exit_code = 3

    def __init__(self, message: str, *, report: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.report = report or {}


class RunDirectoryError(EngineError):
    """A run directory that is damaged, or that belongs to another plan."""

    exit_code = 4


class StageFailedError(EngineError):
    """A stage raised, or used more bytes than it planned; the run can be resumed."""

    exit_code = 5


class StoreFullError(StageFailedError):
    """A disk takes no more: no room, a used-up quota, a file too long. The run can be resumed once it does."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
