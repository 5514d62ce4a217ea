"""Checks of numbers that people give, with one wording for all settings."""

from __future__ import annotations

from engine.errors import UsageError

_BITS = 31


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raise UsageError unless ``value`` is a whole number of at least ``least`` that fits 31 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**_BITS:
        raise UsageError(f"{name}={value!r} must be a whole number of at least {least} that fits {_BITS} bits")


def check_seed(value: object) -> None:
    """Raise UsageError unless ``value`` is a seed: a whole number of at least 0 that fits 63 bits."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UsageError(f"seed={value!r} must be a whole number of at least 0 that fits 63 bits")
