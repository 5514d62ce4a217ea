"""How far the scheduler's times are from the optimum that CP-SAT finds: by family of plans, median and worst.

    python -m tests.benchmarks.schedule_against_optimum [--plans N] [--budgets N] [--limit-s S] [--families ...]

Plans are those of `tests.mixes`, of up to 40 stages; budgets are random shares of what lies between a plan's device
floor and everything. CP-SAT (`tests.optimum`) is asked twice. *Same order*: stages run in the plan's order, ours and
its; it chooses where everything is. *Any order*: both choose the order too. Plans with one order only are asked once.

An optimum is *proved* where CP-SAT shows within the time limit that nothing is faster by more than a thousandth. Where
it does not, the true ratio is somewhere between the ratio to the *best found*, by either of the two, and that to its
lower *bound*, which is often far below anything there is.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.orders import Ties
from engine.plan import Plan
from engine.portfolio import Portfolio
from engine.schedule import best_in_order, best_placement, write_down
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


def compare(plan: Plan, share: float, *, free_order: bool, limit_s: float) -> Case:
    portfolio = Portfolio(plan=plan, profile=PROFILE)
    budget = budget_at(plan, share, portfolio.own.needs.everything_bytes)
    found = best_placement(portfolio, budget) if free_order else best_in_order(portfolio.own, budget)
    schedule = write_down(found[0], budget, found[1])
    best = optimum(plan, budget, PROFILE, free_order=free_order, time_limit_s=limit_s, hint=schedule)
    if best is None:
        least = portfolio.own.clock.total_compute_s
        return Case(seconds=schedule.seconds, found_s=schedule.seconds, bound_s=least, proved=False)
    return Case(seconds=schedule.seconds, found_s=best.seconds, bound_s=best.bound_s, proved=best.proved)


def row_of(family: str, order: str, stages: Sequence[int], cases: Sequence[Case]) -> list[str]:
    proved = [case.seconds / case.found_s for case in cases if case.proved]
    to_bound = [case.seconds / case.bound_s for case in cases if not case.proved]
    to_found = [case.seconds / min(case.found_s, case.seconds) for case in cases if not case.proved]
    figures = [*_median_and_worst(proved), *_median_and_worst(to_found), *_median_and_worst(to_bound)]
    sizes = f"{min(stages)} to {max(stages)}"
    return [family, order, sizes, str(len(cases)), str(len(proved)), *figures]


def _median_and_worst(ratios: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}") if ratios else ("-", "-")


HEADER = [
    "family", "order", "stages", "cases", "proved", "median of proved", "worst of proved", "median to best found",
    "worst to best found", "median to bound", "worst to bound",
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
        plans = [FAMILIES[family](number) for number in range(arguments.plans)]
        asked = [(plan, 0.7 * rng.random()) for plan in plans for _ in range(arguments.budgets)]
        orders = arguments.orders if any(not Ties.of(plan).is_one_order for plan in plans) else ["only"]
        for order in orders:
            cases = [
                compare(plan, share, free_order=order == "any", limit_s=arguments.limit_s) for plan, share in asked
            ]
            rows.append(row_of(family, order, [len(plan.stages) for plan in plans], cases))
            print(rows[-1], flush=True)
    print(heading(f"CP-SAT with 2 threads, at most {arguments.limit_s:g} s an answer"))
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
