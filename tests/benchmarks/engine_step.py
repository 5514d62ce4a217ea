"""One GRPO step by the engine, measured: from loaded weights to merged gradients, no optimizer, no checkpoint.

The engine runs as it always does, with its counter of bytes, its checks and its journal on. Its seconds are those from
the end of the load stage to the end of the last stage.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch

from engine import Budget, Tier
from engine.budget import default_budget
from engine.hardware import load_profile
from engine.plan import Stage, Tap
from engine.planner import Forecast, forecast
from engine.runtime import Outcome, execute, new_recording
from engine.trace import Lane, Recording
from models.policy import PolicySource
from stages import Group, GrpoSettings, GrpoSpace, names

SETTINGS = GrpoSettings(dtype=torch.float32, update_weights=False)
NORM_BLOCK_ELEMENTS = 1 << 20
# Its square in float64 is 8 MiB: nothing beside the step's own memory.

GRADIENTS = names.gradients(names.update_prefix(0, 0, 1))


_SCHEDULED = Path("/proc/thread-self/schedstat")
# On Linux: nanoseconds that a thread ran, and that it was ready but had no core.


def not_waited_s() -> float:
    """Return the seconds of this thread in which it ran, or would have if it had had a core."""
    if not _SCHEDULED.exists():
        return time.thread_time()
    ran_ns, ready_ns, _ = map(int, _SCHEDULED.read_text().split())
    return (ran_ns + ready_ns) / 1e9


@dataclass(kw_only=True)
class StageClock:
    """Observer that knows the seconds of every kind of stage, and those since the load stage ended.

    ``thread_s`` are those of the thread that runs stages in which it did not wait, since then.
    """

    started_s: float = 0.0
    began_s: float = 0.0
    ended_s: float = 0.0
    thread_s: float = 0.0
    _thread_started_s: float = 0.0
    kinds_s: dict[str, float] = field(default_factory=dict)

    def stage_begins(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self.began_s = time.perf_counter()

    def stage_ends(self, stage: Stage, planned_bytes: dict[Tier, int]) -> None:
        self.ended_s = time.perf_counter()
        if stage.kind == "load":
            self.started_s, self._thread_started_s = self.ended_s, not_waited_s()
        else:
            self.thread_s = not_waited_s() - self._thread_started_s
            self.kinds_s[stage.kind] = self.kinds_s.get(stage.kind, 0.0) + self.ended_s - self.began_s

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


@dataclass(kw_only=True)
class GradientNorm:
    """Extra output of a run: norm and checksum of the merged gradients, and the seconds that they took."""

    norm: float = math.nan
    crc32c: int = 0
    seconds: float = 0.0

    def __call__(self, context: Any, path: str) -> None:
        started_s = time.perf_counter()
        gradients = context.tensors(GRADIENTS)
        self.norm = norm_of(gradients.values())
        for name in sorted(gradients):
            self.crc32c = google_crc32c.extend(self.crc32c, gradients[name].numpy().reshape(-1).view(np.uint8))
        self.seconds = time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took.

    ``kinds_s`` are the seconds of every kind of stage; what is missing to ``seconds`` are copies between stages
    (``copies_s``), the journal and the loop. ``thread_s`` are those in which the thread that runs stages did not
    wait for anything but a core. Equal ``grad_crc32c`` are equal bits.
    """

    seconds: float
    thread_s: float
    copies_s: float
    kinds_s: Mapping[str, float]
    grad_norm: float
    grad_crc32c: int
    outcome: Outcome

    def peak_bytes(self, tier: Tier) -> int:
        return self.outcome.measured_peak_bytes[str(tier)]


def step_space(
    policy: PolicySource, group: Group, fixed: Mapping[str, int] | None = None, settings: GrpoSettings = SETTINGS
) -> GrpoSpace:
    """Return the plans of one step of a group. ``fixed`` are choices, and ``page_tokens`` if it is among them.

    The model stays whole, so that there are bytes beyond its weights and gradients to speak of.
    """
    given = {"layer_spans": 1, **(fixed or {})}
    page_tokens = given.pop("page_tokens", settings.page_tokens)
    settings = replace(settings, page_tokens=page_tokens, fixed=given)
    return GrpoSpace(name="benchmark", policy=policy, steps=((group,),), settings=settings)


def roomy_budget(device_bytes: int | None = None) -> Budget:
    """Return the machine's default budget, with other device bytes if they are given."""
    budget = default_budget(Path(tempfile.gettempdir()))
    return budget if device_bytes is None else replace(budget, device_bytes=device_bytes)


def plan_step(space: GrpoSpace, budget: Budget) -> Forecast:
    """Return the planner's choice within ``budget``. Raises DoesNotFitError where there is none."""
    return forecast(space.lower(space.first()), budget, load_profile("cpu"))


def fixed_bytes(planned: Forecast) -> int:
    """Return the bytes of weights and gradients; not those of a tied embedding's second accumulator."""
    return sum(planned.plan.values[name].nbytes for name in (names.WEIGHTS, GRADIENTS))


def run_step(planned: Forecast, folder: Path | None = None) -> Step:
    """Execute a planned step in a temporary run directory, which is made in ``folder`` if one is given."""
    clock, norm = StageClock(), GradientNorm()
    taps = planned.plan.taps
    taps["norm"] = Tap(after=taps["gradients"].after, run=norm)
    with tempfile.TemporaryDirectory(prefix="longstraw-bench-", dir=folder) as inside:
        run = Path(inside) / "run"
        recording = new_recording(planned)
        wanted = {"norm": str(Path(inside) / "norm")}
        outcome = execute(planned, run, wanted=wanted, observers=[clock], recording=recording)
    return Step(
        seconds=clock.seconds - norm.seconds,
        thread_s=clock.thread_s - norm.seconds,
        copies_s=copies_alone_s(recording),
        kinds_s=clock.kinds_s,
        grad_norm=norm.norm,
        grad_crc32c=norm.crc32c,
        outcome=outcome,
    )


def copies_alone_s(recording: Recording) -> float:
    """Return the seconds of copies between tiers that no stage ran beside."""
    stages = [span for span in recording.spans if span.lane is Lane.WORKER]
    copies = [span for span in recording.spans if span.lane is not Lane.WORKER]
    return sum(
        copy.seconds
        for copy in copies
        if not any(stage.begin_s < copy.end_s and copy.begin_s < stage.end_s for stage in stages)
    )


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Return the norm of tensors as one vector, summed in float64; by numpy, so that no counter sees it."""
    blocks = (block for tensor in tensors for block in np.array_split(tensor.numpy().ravel(), _num_blocks(tensor)))
    return math.sqrt(math.fsum(float(np.square(block, dtype=np.float64).sum()) for block in blocks))


def _num_blocks(tensor: torch.Tensor) -> int:
    return 1 + tensor.numel() // NORM_BLOCK_ELEMENTS
