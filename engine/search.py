"""Searching for the largest value that is good, or the smallest, by asking about few of them.

The values are whole numbers, and asking about one is dear: it is a plan to be made. What is known afterwards is a
`Bracket`: a good value, and one close beside it that is not.

Assumption: values are good up to a point and not beyond it. Where that is not so, what is said of the bracket is still
true, but there may be good values beyond it.

This module is pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Good = Callable[[int], bool]

COARSENESS = 100
# A largest value is found to 1 %: of a count of tokens nobody wants to know more, and a count below 100 is exact.

FINENESS = 1000
# A smallest one is found to 0.1 %: budgets are set in such steps.


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """``good`` is the best value that is good, ``bad`` the one beside it that is not; None where none was found."""

    good: int | None
    bad: int | None


def largest_that(good: Good, start: int, *, most: int, go_on: Callable[[], bool] = lambda: True) -> Bracket:
    """Return the largest good value, to 1 % and up to ``most``.

    From ``start``, which is at least 0 and no more than ``most``, values are doubled, or halved where it is not good;
    then halfway between, in round numbers. No value is larger than one that is not good. Before each doubling
    ``go_on`` is asked; where it says no, ``bad`` is None, as it is where ``most`` is good.
    """
    if not good(start):
        return _largest_below(good, start)
    best = start
    while best < most:
        if not go_on():
            return Bracket(good=best, bad=None)
        larger = min(max(1, 2 * best), most)
        if not good(larger):
            return _largest_between(good, best, larger)
        best = larger
    return Bracket(good=best, bad=None)


def _largest_below(good: Good, bad: int) -> Bracket:
    while bad > 1:
        smaller = bad // 2
        if good(smaller):
            return _largest_between(good, smaller, bad)
        bad = smaller
    return Bracket(good=None, bad=bad)


def _largest_between(good: Good, best: int, bad: int) -> Bracket:
    """Narrow to one step of a round number, the largest power of two within 1 % of ``best``."""
    step = 1 << max(0, (best // COARSENESS).bit_length() - 1)
    while (middle := (best // step + 1 + (bad - 1) // step) // 2 * step) > best and middle < bad:
        if good(middle):
            best = middle
        else:
            bad = middle
    return Bracket(good=best, bad=bad)


def smallest_that(good: Good, *, least: int, most: int) -> Bracket:
    """Return the smallest good value from ``least`` to ``most``, both of them included, to 0.1 %.

    ``bad`` is None where ``least`` is good; ``good`` is None where ``most`` is not.
    """
    if good(least):
        return Bracket(good=least, bad=None)
    if least >= most or not good(most):
        return Bracket(good=None, bad=max(least, most))
    best, bad = most, least
    while best - bad > max(1, best // FINENESS):
        middle = (best + bad) // 2
        if good(middle):
            best = middle
        else:
            bad = middle
    return Bracket(good=best, bad=bad)
