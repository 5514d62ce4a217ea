"""Bytes and seconds as people write them. Parsed once, at the edge; integers inside."""

from __future__ import annotations

import re
from fractions import Fraction

from engine.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNIT_BYTES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip
LARGEST_BYTES = 2**62
# More than any machine has, and still a 64-bit integer in a journal.
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, *, least: int = 1) -> int:
    """Return the number of bytes that ``text`` names, such as ``8GiB``, ``500MB`` or ``1048576``.

    Raises:
        UsageError: the text is not a size, its unit is unknown, or it is no whole number of bytes from ``least`` on.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).lower() not in _UNIT_BYTES:
        raise UsageError(
            f"not a size: {shortened(text)!r}; write a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, "
            "such as 8GiB"
        )
    exact = Fraction(match.group(1)) * _UNIT_BYTES[match.group(2).lower()]
    if exact < least:
        raise UsageError(f"a size must be at least one byte: {text!r}")
    if exact.denominator != 1 and match.group(2).lower() in ("", "b"):
        raise UsageError(f"a size is a whole number of bytes: {text!r}")
    if exact > LARGEST_BYTES:
        raise UsageError(f"a size must be at most 2**62 bytes: {text!r}")
    return int(exact)


def shortened(text: str, most: int = 60) -> str:
    """Return text as an error repeats it: its beginning, where it is long."""
    return text if len(text) <= most else f"{text[:most]}..."


def format_bytes(nbytes: float) -> str:
    """Return ``nbytes`` in the largest binary unit that keeps at least one digit before the point."""
    size, sign = abs(float(nbytes)), "-" if nbytes < 0 else ""
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{sign}{size / scale:.2f} {unit}"
    return f"{sign}{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it: ``85 ms``, ``12.3 s``, ``2 h 05 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 120:
        return f"{minutes} min {int(seconds % 60):02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
