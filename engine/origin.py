"""Which line of a person's own file something comes from.

Errors about a stage or a Value name the line of the plan file that asked for it, not the line of ours that noticed. A
*user's frame* is one whose code is neither ours nor the standard library's nor an installed package's; the plans that
ship with us count as a user's. An *origin* is text such as ``my_plan.py line 12``; it is for people, decides nothing.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1]) + os.sep
_OURS = tuple(f"{_ROOT}{name}{os.sep}" for name in ("engine", "stages", "models"))
_PLANS = f"{_ROOT}plans{os.sep}"
_INSTALLED = tuple(
    path.rstrip(os.sep) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    if (path := sysconfig.get_path(name))
)


@lru_cache(maxsize=1024)
def is_users(filename: str) -> bool:
    """Return whether code of this file name is a user's own."""
    if filename == "<string>" or filename.startswith("<frozen"):  # methods of dataclasses; the import system
        return False
    path = filename if filename.startswith("<") else os.path.abspath(filename)
    return path.startswith(_PLANS) or not path.startswith((*_OURS, *_INSTALLED))


def caller_origin() -> str:
    """Return the origin of the innermost user's frame that led here; empty where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return _origin(frame.f_code.co_filename, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def error_origin(error: BaseException) -> str:
    """Return the origin of the innermost user's frame in an error's traceback; empty where there is none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = _origin(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def function_origin(function: object) -> str:
    """Return the origin of a function's definition; empty where it has no code of its own."""
    code = getattr(function, "__code__", None)
    return "" if code is None else _origin(code.co_filename, code.co_firstlineno)


def at(origin: str) -> str:
    """Return an origin as the end of a message: `` (my_plan.py line 12)``, or nothing."""
    return f" ({origin})" if origin else ""


def _origin(filename: str, line: int) -> str:
    return f"{os.path.basename(filename)} line {line}"
