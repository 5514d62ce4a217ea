"""Plain data: what the journal, results and standard output may hold. Numbers, text, lists and mappings of them.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def _is_plain(value: object) -> bool:
    """Return whether a value is plain data."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def plain(data: Mapping[str, object]) -> dict[str, Any]:
    """Return a mapping as plain data; what is none is told as text."""
    return {
        key: plain(value) if isinstance(value, Mapping) else value if _is_plain(value) else str(value)
        for key, value in data.items()
    }


def finite(data: Any) -> Any:
    """Return plain data with None for numbers that JSON can't hold (infinities, not-a-numbers)."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
