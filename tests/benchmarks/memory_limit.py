"""A process held to a limit of memory from outside, in two ways at once.

The kernel holds it where it can: a control group of memory (version 2 or 1) within the caller's own. That one can't be
outrun, but it does not count file pages that somebody else brought into memory before, such as mapped weights. So a
watcher reads the resident set, mapped files included, from ``/proc`` every 20 ms and kills a process that has passed
the limit. `Ended` says whether there was a group.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.units import KIB

GROUPS = Path("/sys/fs/cgroup")
WATCH_S = 0.02
GROUP_EMPTY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MemoryGroup:
    """A control group: its folder and the names of its files of limit and of the most that was used."""

    folder: Path
    limit_file: str
    peak_file: str

    def peak_bytes(self) -> int:
        """Return the most that the group has used, file pages included."""
        return int((self.folder / self.peak_file).read_text())


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a limited process ended. ``rss_bytes`` is its largest resident set, as far as it was seen."""

    held_by: str
    killed: bool
    return_code: int
    rss_bytes: int
    output: str
    errors: str
    seconds: float


def run_limited(command: Sequence[str], limit_bytes: int) -> Ended:
    """Run a command under a limit of memory and return how it ended."""
    started_s = time.monotonic()
    with memory_group(limit_bytes) as group:
        # The shell joins the group and becomes the command, so that not a byte of it is outside.
        joined = ["sh", "-c", f'echo $$ > {group.folder}/cgroup.procs; exec "$@"', "sh"] if group else []
        child = subprocess.Popen([*joined, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        rss_bytes = _watch(child, limit_bytes)
        output, errors = child.communicate()
    return Ended(
        held_by="control group and a watcher" if group else "watcher",
        killed=child.returncode == -signal.SIGKILL,
        return_code=child.returncode,
        rss_bytes=rss_bytes,
        output=output,
        errors=errors,
        seconds=time.monotonic() - started_s,
    )


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup | None]:
    """Make a control group of memory for a while; None where that can't be done."""
    group = _new_group()
    if group is None:
        yield None
        return
    try:
        (group.folder / group.limit_file).write_text(str(limit_bytes))
        yield group
    finally:
        _remove(group.folder)


def _new_group() -> MemoryGroup | None:
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        first = "memory" in controllers.split(",")
        if not first and controllers:
            continue
        parent = (GROUPS / "memory" if first else GROUPS) / path.lstrip("/")
        limit_file, peak_file = (
            ("memory.limit_in_bytes", "memory.max_usage_in_bytes") if first else ("memory.max", "memory.peak")
        )
        folder = parent / f"longstraw-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            if os.access(folder / limit_file, os.W_OK):
                return MemoryGroup(folder=folder, limit_file=limit_file, peak_file=peak_file)
            folder.rmdir()
    return None


def _remove(folder: Path) -> None:
    """Remove a group; it counts its last process for a moment after that has ended."""
    until_s = time.monotonic() + GROUP_EMPTY_S
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(WATCH_S)


def _watch(child: subprocess.Popen[str], limit_bytes: int) -> int:
    """Wait for the end of a process and return its largest resident set; kill it if that passes the limit."""
    largest_bytes = 0
    while child.poll() is None:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{child.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                largest_bytes = max(largest_bytes, int(found.group(1)) * KIB)
        if largest_bytes > limit_bytes:
            child.kill()
        time.sleep(WATCH_S)
    return largest_bytes
