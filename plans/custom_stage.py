"""A plan of nothing but own stages, with no model in it: which topics of Python's documentation are most alike?

    engine simulate custom_stage
    engine execute custom_stage
    engine execute custom_stage --set parts=4 --set buckets=2048 --budget device=2MiB

Every topic becomes a row of word counts, scaled to length one; the rows come in ``parts`` blocks. Every pair of blocks
is compared once. All blocks together do not fit the budget below: the engine moves those that are not compared to the
host and to disk and back. Copy this file to begin a plan of your own.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from engine import Plan, TensorSpec, Value, stage
from engine.errors import UsageError
from engine.units import KIB

if TYPE_CHECKING:
    import torch

DEVICE_BUDGET_BYTES = 800 * KIB
HOST_BUDGET_BYTES = 1024 * KIB
# With the settings below a pair of blocks takes 640 KiB, and all eight take 2.5 MiB.

NAMES = sorted({text: name for name, text in sorted(topics.items())}.values())
# Several names may stand for one text; each text is taken once.

ITEM_BYTES = 4
# Of float32.


def topics_of(part: int, parts: int) -> list[str]:
    """Return the names of a part's topics: every ``parts``-th, so that all parts are of about one size."""
    return NAMES[part::parts]


# What a stage writes: its size has to be known ahead, so it is a function of the stage's own arguments. The parameter
# ``out`` is the tensor to fill. The row of counts that is made beside it is the workspace.
@stage(
    writes=lambda part, parts, buckets: TensorSpec(shape=(len(topics_of(part, parts)), buckets), dtype="float32"),
    workspace_bytes=lambda buckets: buckets * ITEM_BYTES,
)
def count_words(out: torch.Tensor, *, part: int, parts: int, buckets: int) -> None:
    """Write a row of word counts for every topic of a part; ``buckets`` of words share a column."""
    for row, name in zip(out, topics_of(part, parts), strict=True):
        words = re.findall(r"[a-z]+", topics[name].lower())
        counts = Counter(zlib.crc32(word.encode()) % buckets for word in words)
        row.copy_(row.new_tensor([counts[bucket] for bucket in range(buckets)]))
        row.div_(row.norm())


# What a stage reads: the parameters that get Values. What it changes in place: those that ``updates`` names. Its
# workspace is the matrix of similarities and a few numbers; ``flops`` is for the simulated time alone.
@stage(
    updates=("total", "closest"),
    workspace_bytes=lambda left, right: (left.shape[0] * right.shape[0] + 8) * ITEM_BYTES,
    flops=lambda left, right: 2 * left.num_elements * right.shape[0],
)
def compare(
    total: torch.Tensor, closest: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: int, second: int
) -> None:
    """Compare all topics of two parts: add up their similarities, and keep the closest pair so far."""
    similarity = left @ right.T
    if first == second:
        similarity.triu_(diagonal=1)  # every pair once, and none with itself
    total.add_(similarity.sum())
    row, column = divmod(int(similarity.argmax()), similarity.shape[1])
    if similarity[row, column] > closest[0]:
        for place, number in enumerate((float(similarity[row, column]), first, row, second, column)):
            closest[place] = number


# What a stage reports: numbers, text, lists and dicts, in the closing lines and in the run's metrics.
@stage
def summary(
    total: torch.Tensor, closest: torch.Tensor, report: Callable[[str, Any], None], *, parts: int, pairs: int
) -> None:
    """Report the mean similarity and the closest two topics."""
    similarity, first, row, second, column = closest.tolist()
    report("mean_similarity", float(total) / pairs)
    report("closest_similarity", similarity)
    report("closest_topics", [topics_of(int(first), parts)[int(row)], topics_of(int(second), parts)[int(column)]])


# The plan: ordinary Python that calls the stages. Each call takes the plan first and returns the Value that it writes.
def custom_stage(parts: int = 8, buckets: int = 8192) -> Plan:
    """Compare all topics with each other, in ``parts`` blocks of rows with ``buckets`` columns."""
    if not 1 <= parts <= len(NAMES) or buckets < 1:
        raise UsageError(f"parts={parts} must be 1 to {len(NAMES)}, and buckets={buckets} at least 1")
    plan = Plan(
        name="custom_stage",
        settings={"parts": parts, "buckets": buckets},
        budget={"device": DEVICE_BUDGET_BYTES, "host": HOST_BUDGET_BYTES},
    )
    total = plan.accumulator("total", TensorSpec(shape=(), dtype="float64"))
    closest = plan.accumulator("closest", TensorSpec(shape=(5,), dtype="float64"))
    blocks: list[Value] = [count_words(plan, part=part, parts=parts, buckets=buckets) for part in range(parts)]
    for first in range(parts):
        for second in range(first, parts):
            compare(plan, total, closest, blocks[first], blocks[second], first=first, second=second)
    summary(plan, total, closest, parts=parts, pairs=len(NAMES) * (len(NAMES) - 1) // 2)
    return plan
