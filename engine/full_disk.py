"""A disk that takes no more, told with what was needed, what there is, and what to do.

Three refusals count: no room, a used-up quota, and a file longer than this process or the file system allows. Libraries
written in Rust (safetensors) raise errors of their own, which have the system's number in words.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import StoreFullError
from engine.units import format_bytes

_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_WORDS = re.compile(r"\(os error (\d+)\)")


@contextlib.contextmanager
def full_disk_explained(root: Path, needed_bytes: int, what: str) -> Iterator[None]:
    """Turn the error of a disk that takes no more into ``StoreFullError``; ``root`` lies on that disk.

    What is free is asked when the error arrives, so what was half-written should be gone by then.
    """
    try:
        yield
    except Exception as error:
        code = refusal(error)
        if code is None:
            raise
        free_bytes = shutil.disk_usage(root if root.exists() else root.parent).free
        raise StoreFullError(
            f"no room for {what}: it needs {needed_bytes} bytes ({format_bytes(needed_bytes)}), "
            f"{_limit(root, free_bytes, code)}: {os.strerror(code)}{what_to_do(error)}",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        ) from error


def refusal(error: BaseException) -> int | None:
    """Return the system's number of an error that says that a disk takes no more; None for every other error."""
    words = _IN_WORDS.search(str(error))
    code = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
    return code if code in _REFUSALS else None


def what_to_do(error: BaseException) -> str:
    """Return what helps against a disk that takes no more, as the end of a message; empty for every other error."""
    code = refusal(error)
    if code is None:
        return ""
    return f"; {'allow longer files (ulimit -f)' if code == errno.EFBIG else 'make room'}, then resume the run"


def _limit(root: Path, free_bytes: int, code: int) -> str:
    if code != errno.EFBIG:
        return f"the disk of {root} has {free_bytes} free ({format_bytes(free_bytes)})"
    longest_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if longest_bytes == resource.RLIM_INFINITY:
        return f"the file system of {root} takes no file as long"
    return f"a file in {root} may have {longest_bytes} at most ({format_bytes(longest_bytes)})"
