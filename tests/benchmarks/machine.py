"""What figures are of: the machine, the versions, the date; and how they are printed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from engine import __version__
from engine.units import MIB


def cpu_name() -> str:
    """Return the processor's name as Linux states it, or the platform's where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{found[0]}, {len(found)} logical cores" if found else platform.processor()


def machine() -> dict[str, str]:
    """Return date, processor and versions by name."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "versions": f"LongStraw {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def heading(work: str) -> str:
    """Return the machine and what was done on it, as a Markdown list."""
    found = machine()
    return "\n".join(f"- {line}" for line in (f"{found['date']}, {found['processor']}", found["versions"], work))


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; columns of numbers are set to the right."""
    numeric = [all(_is_number(str(row[column])) for row in rows) for column in range(len(header))]
    rule = ["---:" if is_number else "---" for is_number in numeric]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, rule, *rows))


def mib(nbytes: float) -> str:
    """Return bytes as MiB with one digit."""
    return f"{nbytes / MIB:,.1f}"


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.replace(",", "").replace(".", "").replace(" %", "").lstrip("-").isdigit()
