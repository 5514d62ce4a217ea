"""Where a step's time goes, by torch's profiler: operators by kind, autograd, and what is left.

Every event's *self* time is its own without that of what it calls. What no event covers is Python (of the stages, of
the engine, of the counter of live bytes) and waiting for files. The profiler itself takes time for every operator, so
these are shares of a profiled run and not times of a free one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "matmul", "linear", "baddbmm"),
    "attention": ("_flash_attention", "_scaled_dot_product"),
    "copies and fills": ("copy_", "clone", "cat", "zero_", "fill_", "_to_copy", "zeros", "contiguous"),
}
AUTOGRAD, OTHER, LEFT = "autograd's own", "other operators", "Python and waiting"


def time_spent(work: Callable[[], float]) -> dict[str, float]:
    """Do the work and return its seconds by where they went; they add up to the whole.

    ``work`` returns the seconds that count: they end with its last operator, and what came before them is left out.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        seconds = work()
    events = recorded.events()
    begin_us = max(event.time_range.end for event in events) - seconds * 1e6
    spent: Counter[str] = Counter()
    for event in (event for event in events if event.time_range.start >= begin_us):
        spent[kind_of(event)] += event.self_cpu_time_total / 1e6
    return {**dict(spent.most_common()), LEFT: seconds - spent.total()}


def kind_of(event: Any) -> str:
    """Return what an event's self time is spent on."""
    name = str(event.name)
    if name.startswith("autograd::") or not name.startswith("aten::"):
        return AUTOGRAD
    operator = name.removeprefix("aten::")
    for kind, names in KINDS.items():
        if operator in names or (kind == "attention" and any(part in operator for part in names)):
            return kind
    return OTHER
