"""How far the scheduler's times are from the optimum that CP-SAT finds: by family of plans, median and worst.

    python -m tests.benchmarks.schedule_against_optimum [--plans N] [--budgets N] [--limit-s S] [--families ...]

Plans are those of `tests.mixes`, of up to 40 stages; budgets are random shares of what lies between a plan's device
floor and everything. CP-SAT (`tests.optimum`) is asked twice. *Same order*: its stages run in the plan's order, and it
chooses where everything is. *Any order*: it chooses the order too. Where it does not prove its optimum within the time
limit, what is known is a lower bound, so the ratio to that is an upper bound of the true one, and often far above it;
*best found* is the ratio to the best schedule that either of the two found, which the true one is at least.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.needs import needs_of
from engine.placer import Placer
from engine.schedule import make_schedule
from tests.benchmarks.machine import heading, markdown
from tests.mixes import FAMILIES, PROFILE, budget_at
from tests.optimum import optimum


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan under a budget: our seconds, CP-SAT's, and what no schedule is below."""

    seconds: float
    found_s: float
    bound_s: float
    proved: bool


def compare(family: str, number: int, share: float, *, free_order: bool, limit_s: float) -> Case:
    plan = FAMILIES[family](number)
    placer = Placer(needs=needs_of(plan, plan.ordered()), profile=PROFILE)
    budget = budget_at(plan, share, placer.everything_bytes)
    schedule = make_schedule(plan, budget, PROFILE)
    best = optimum(plan, budget, PROFILE, free_order=free_order, time_limit_s=limit_s, hint=schedule)
    if best is None:
        least = placer.total_compute_s
        return Case(seconds=schedule.seconds, found_s=schedule.seconds, bound_s=least, proved=False)
    return Case(seconds=schedule.seconds, found_s=best.seconds, bound_s=best.bound_s, proved=best.proved)


def row_of(family: str, order: str, cases: Sequence[Case]) -> list[str]:
    proved = [case.seconds / case.found_s for case in cases if case.proved]
    to_bound = [case.seconds / case.bound_s for case in cases if not case.proved]
    to_found = [case.seconds / min(case.found_s, case.seconds) for case in cases if not case.proved]
    figures = [
        *_median_and_worst(proved),
        *_median_and_worst(to_bound),
        _median_and_worst(to_found)[1],
    ]
    return [family, order, str(len(cases)), str(len(proved)), *figures]


def _median_and_worst(ratios: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}") if ratios else ("-", "-")


HEADER = [
    "family", "order", "cases", "proved", "median of proved", "worst of proved", "median to bound", "worst to bound",
    "worst to best found",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=3, help="of each family")
    parser.add_argument("--budgets", type=int, default=3, help="of each plan")
    parser.add_argument("--limit-s", type=float, default=20.0, help="for each answer of CP-SAT")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--orders", nargs="+", choices=["same", "any"], default=["same", "any"])
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    for family in arguments.families:
        rng = random.Random(family)
        asked = [(number, 0.7 * rng.random()) for number in range(arguments.plans) for _ in range(arguments.budgets)]
        for order in arguments.orders:
            cases = [
                compare(family, number, share, free_order=order == "any", limit_s=arguments.limit_s)
                for number, share in asked
            ]
            rows.append(row_of(family, order, cases))
            print(rows[-1], flush=True)
    print(heading(f"CP-SAT with 2 threads, at most {arguments.limit_s:g} s an answer"))
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
