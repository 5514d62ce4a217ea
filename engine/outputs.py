"""Files that a command writes where a person asks for them, beside its results: trace, report, gradients.

Invariant: what can't be written, or would take the place of something else, is told before anything slow.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.atomic import atomic_write_text, check_writable
from engine.errors import UsageError
from engine.plain import finite

if TYPE_CHECKING:
    from engine.planner import Forecast
    from engine.trace import Recording


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The paths that were asked for; None where none was."""

    trace: str | None = None
    report: str | None = None
    gradients: str | None = None

    def over(self, others: Outputs) -> Outputs:
        """Return these, made absolute, where they were asked for, and the others elsewhere."""
        mine = {name: os.path.abspath(path) for name, path in vars(self).items() if path is not None}
        return Outputs(**{**vars(others), **mine})

    def check(self, *, plan: str | None = None, run: Path | None = None) -> None:
        """Say at once that a file can't be written, or would take the place of another.

        ``plan`` is the plan's file, ``run`` the run directory, whose files are its own.

        Raises:
            UsageError: that is so, or what draws the report is not installed.
        """
        from engine.pictures.page import check_report_packages

        for path in (self.trace, self.report):
            if path is not None:
                check_writable(path)
        if self.report is not None:
            check_report_packages()
        taken = {} if plan is None else {os.path.realpath(plan): "the plan"}
        for flag, path in (("--trace", self.trace), ("--report", self.report), ("--save-gradients", self.gradients)):
            if path is None:
                continue
            if run is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
                raise UsageError(f"{flag} names {path!r}, which is in the run directory {run}; name a place outside")
            other = taken.setdefault(os.path.realpath(path), flag)
            if other != flag:
                raise UsageError(f"{flag} names {path!r}, which is {other}'s file; give each a file of its own")

    def write_trace(self, *recordings: Recording) -> None:
        """Write the trace, if it was asked for."""
        from engine.trace import chrome_trace

        if self.trace is not None:
            atomic_write_text(Path(self.trace), chrome_trace(recordings))

    def write_report(self, data: Mapping[str, Any], planned: Forecast, measured: Recording | None = None) -> None:
        """Write the report, if it was asked for."""
        from engine.pictures.page import report_page

        if self.report is not None:
            atomic_write_text(Path(self.report), report_page(finite(data), planned, measured))

    def lines(self) -> str:
        """Return the closing lines that say where trace and report are."""
        found = {"trace": self.trace, "report": self.report}
        return "".join(f"\n{name}: {path}" for name, path in found.items() if path is not None)
