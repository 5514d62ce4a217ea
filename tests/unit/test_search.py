"""The search for the largest or smallest value that is good, held against trying every value."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.search import COARSENESS, FINENESS, Bracket, Good, largest_that, smallest_that

MOST = 3000


class Asked:
    """A question that remembers what it was asked."""

    def __init__(self, good: Good) -> None:
        self._good = good
        self.values: list[int] = []

    def __call__(self, value: int) -> bool:
        self.values.append(value)
        return self._good(value)


@given(last=st.integers(-1, MOST + 5), start=st.integers(0, MOST), most=st.integers(1, MOST))
def test_the_largest_value_is_that_of_trying_every_one_to_a_hundredth(last: int, start: int, most: int) -> None:
    most = max(start, most)
    every = [value for value in range(most + 1) if value <= last]
    found = largest_that(lambda value: value <= last, start, most=most)
    if found.good is None:
        assert start > 0 or not every
        assert not [value for value in every if value > 0]
    else:
        assert found.good <= every[-1] <= found.good + found.good // COARSENESS
        assert (found.bad is None) == (found.good == most)


@given(good=st.sets(st.integers(0, MOST)), start=st.integers(0, MOST))
def test_whatever_is_good_the_bracket_says_the_truth(good: set[int], start: int) -> None:
    asked = Asked(good.__contains__)
    found = largest_that(asked, start, most=MOST)
    assert found.good is None or found.good in good
    assert found.bad not in good
    if found.good is not None and found.bad is not None:
        assert 1 <= found.bad - found.good <= max(1, found.good // COARSENESS)
    assert {found.good, found.bad} <= {*asked.values, None}


@given(last=st.integers(0, 10**9))
def test_no_value_is_asked_about_twice_and_none_that_is_much_too_large(last: int) -> None:
    asked = Asked(lambda value: value <= last)
    largest_that(asked, 600, most=2**31)
    assert len(set(asked.values)) == len(asked.values) <= 40
    assert max(asked.values) <= max(600, 2 * last)


def test_values_between_are_round() -> None:
    asked = Asked(lambda value: value <= 40_000)
    assert largest_that(asked, 600, most=2**24) == Bracket(good=39_936, bad=40_192)
    assert all(value % 256 == 0 for value in asked.values[7:])


def test_where_the_search_is_told_to_stop_nothing_beyond_is_known() -> None:
    asked = Asked(lambda value: True)
    assert largest_that(asked, 8, most=2**24, go_on=lambda: len(asked.values) < 3) == Bracket(good=32, bad=None)
    assert asked.values == [8, 16, 32]


@given(first=st.integers(0, MOST + 5), least=st.integers(0, MOST), most=st.integers(0, MOST))
def test_the_smallest_value_is_that_of_trying_every_one_to_a_thousandth(first: int, least: int, most: int) -> None:
    every = [value for value in range(least, most + 1) if value >= first]
    found = smallest_that(lambda value: value >= first, least=least, most=max(least, most))
    if not every:
        assert found.good is None or found.good == least >= first
    else:
        assert found.good is not None
        assert every[0] <= found.good <= every[0] + max(0, found.good // FINENESS)
        assert (found.bad is None) == (found.good == least)


@given(good=st.sets(st.integers(0, MOST)), least=st.integers(0, MOST))
def test_whatever_is_good_the_smallest_value_is_beside_one_that_is_not(good: set[int], least: int) -> None:
    found = smallest_that(good.__contains__, least=least, most=MOST)
    assert found.good is None or found.good in good
    assert found.bad not in good
    if found.good is not None and found.bad is not None:
        assert 1 <= found.good - found.bad <= max(1, found.good // FINENESS)
