"""Sizes and times: what people write is parsed exactly or refused with text that says what to write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("8g", 8 * GIB),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("2TiB", 2 * TIB),
        ("3tb", 3_000_000_000_000),
        ("64k", 64 * KIB),
        ("7m", 7 * MIB),
        ("1048576", MIB),
        ("12B", 12),
        ("  4 KB ", 4000),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["8 gigs", "", "GiB", "-1GiB", "8GiB16", "1e9", "8,5GiB", "8 PiB", "inf", "0x10"])
def test_what_is_no_size_is_refused_with_text_that_says_what_to_write(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_bytes(text)
    assert str(raised.value) == (
        f"not a size: {text!r}; write a number with one of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, such as 8GiB"
    )


@pytest.mark.parametrize("text", ["0", "0GiB", "0.3B"])
def test_a_size_of_less_than_one_byte_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a size must be at least one byte"):
        parse_bytes(text)


def test_a_refused_size_is_also_a_value_error_and_a_usage_error_of_the_command_line() -> None:
    with pytest.raises(ValueError, match="8 gigs") as raised:
        parse_bytes("8 gigs")
    assert isinstance(raised.value, UsageError)
    assert raised.value.exit_code == 2


@given(st.integers(min_value=1, max_value=2**52))
def test_a_whole_number_of_bytes_is_exact_however_large(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == nbytes
    assert parse_bytes(f"{nbytes}KiB") == nbytes * KIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (3 * MIB, "3.00 MiB"),
        (5 * GIB // 2, "2.50 GiB"),
        (1100 * TIB, "1100.00 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_keeps_a_digit_before_the_point(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_a_written_size_can_be_read_again_and_is_off_by_rounding_only(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.005 * nbytes + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0854, "85 ms"),
        (12.34, "12.3 s"),
        (119.0, "119.0 s"),
        (125.0, "2 min 05 s"),
        (7199.0, "119 min 59 s"),
        (7500.0, "2 h 05 min"),
    ],
)
def test_seconds_are_written_as_people_read_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_size_that_no_journal_could_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 2\\*\\*62"):
        parse_bytes("99999999999TiB")


@pytest.mark.parametrize("text", ["9" * 5000, "1." + "0" * 5000])
def test_a_size_of_thousands_of_digits_is_refused_in_a_short_line(text: str) -> None:
    with pytest.raises(UsageError, match="not a size") as raised:
        parse_bytes(text)
    assert len(str(raised.value)) < 200
