"""Where a step's time goes, by torch's profiler: kernels by kind, copies between tiers, Python, waiting.

Every event's *self* time is its own without that of what it calls. Copies between tiers are those that no stage runs
beside. Waiting is of the thread that runs stages: for files, or for another thread. The rest is Python: of the stages,
of the engine, of its counter of live bytes. The profiler itself takes time for every operator, so these are shares of
a profiled run and not times of a free one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.engine_step import Step

KINDS = {
    "kernels: matrix products": ("mm", "addmm", "addmm_", "bmm", "matmul", "linear", "baddbmm"),
    "kernels: attention": ("_flash_attention", "_scaled_dot_product"),
    "kernels: copies and fills": ("copy_", "clone", "cat", "zero_", "fill_", "_to_copy", "zeros", "contiguous"),
}
AUTOGRAD, OTHER = "autograd's own", "kernels: others"
COPIES, WAITING, PYTHON = "copies between tiers", "waiting", "Python"


def time_spent(work: Callable[[], Step]) -> dict[str, float]:
    """Run a step and return its seconds by where they went; they add up to the whole.

    They end with its last operator, and what came before its weights were loaded is left out.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step = work()
    events = recorded.events()
    begin_us = max(event.time_range.end for event in events) - step.seconds * 1e6
    spent: Counter[str] = Counter()
    for event in (event for event in events if event.time_range.start >= begin_us):
        spent[kind_of(event)] += event.self_cpu_time_total / 1e6
    waited_s = max(0.0, step.seconds - step.thread_s)
    found = {**dict(spent.most_common()), COPIES: step.copies_s, WAITING: waited_s}
    return {**found, PYTHON: step.seconds - sum(found.values())}


def kind_of(event: Any) -> str:
    """Return what an event's self time is spent on."""
    name = str(event.name)
    if name.startswith("autograd::") or not name.startswith("aten::"):
        return AUTOGRAD
    operator = name.removeprefix("aten::")
    for kind, names in KINDS.items():
        if operator in names or (kind == "kernels: attention" and any(part in operator for part in names)):
            return kind
    return OTHER
