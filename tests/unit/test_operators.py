"""What stages issue beside their models: the operators of real runs are counted again."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from engine.budget import UNLIMITED_BYTES, Budget, Tier
from engine.hardware import PROFILES
from engine.plan import Stage
from engine.planner import forecast
from engine.runtime import execute
from plans.tiny_dense import tiny_dense
from plans.tiny_hybrid import tiny_hybrid
from tests.unit.test_geometry import Counted

ROOM = Budget(device_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES)


class CountingStages:
    """Counts the operators of every stage, and what its cost says of them, by kind."""

    def __init__(self) -> None:
        self.counted: dict[str, float] = defaultdict(float)
        self.real: dict[str, int] = defaultdict(int)

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self._count = Counted()
        self._count.__enter__()

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self._count.__exit__(None, None, None)
        self.counted[stage.kind] += stage.cost.num_kernels
        self.real[stage.kind] += self._count.num_kernels


PLANS = {
    "several branches": {},
    "chunks of several pages": {"prompt_tokens": 2500, "chunk_tokens": 1024},
    "nothing kept": {"prompt_tokens": 1100, "chunk_tokens": 256, "stored_inputs": 0},
    "one branch at a time, inputs kept": {"prompt_tokens": 700, "branches_at_once": 1, "stored_inputs": 1},
}
KINDS = ("prefill", "score", "loss", "replay", "sweep", "norms", "clip", "adamw")


HYBRIDS = {
    "several branches": {},
    "nothing kept": {"prompt_tokens": 1100, "chunk_tokens": 256, "stored_inputs": 0, "layer_spans": 1},
    "long responses in chunks, inputs kept": {"response_tokens": 300, "chunk_tokens": 128, "stored_inputs": 1},
}


@pytest.mark.parametrize("settings", HYBRIDS.values(), ids=HYBRIDS)
def test_stages_of_hybrids_do_so_too(settings: dict[str, int], tmp_path: Path) -> None:
    counting = CountingStages()
    execute(forecast(tiny_hybrid(**settings), ROOM, PROFILES["cpu"]), tmp_path / "run", observers=[counting])  # type: ignore[arg-type]
    assert {kind: counting.counted[kind] / counting.real[kind] for kind in KINDS} == pytest.approx(
        dict.fromkeys(KINDS, 1.0), rel=0.1
    )


@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS)
def test_stages_issue_as_many_operators_as_their_costs_say(settings: dict[str, int], tmp_path: Path) -> None:
    counting = CountingStages()
    execute(forecast(tiny_dense(**settings), ROOM, PROFILES["cpu"]), tmp_path / "run", observers=[counting])  # type: ignore[arg-type]
    assert {kind: counting.counted[kind] / counting.real[kind] for kind in KINDS} == pytest.approx(
        dict.fromkeys(KINDS, 1.0), rel=0.1
    )
