"""The audit: the planned gradient against dense autograd, and the bias of stopping at the prompt.

It looks at the first update of a run. Where responses are sampled, they are sampled once, and what was sampled is what
all three gradients are taken on. The engine's gradient is computed by executing the plan itself, up to the merge, in a
temporary run directory; the reference is `stages.dense`. Errors, as reported: ``max_rel_err`` is the largest over
parameters of max|difference| / max(max|reference of that parameter|, 1e-6 max|reference of all|); ``l2_rel_err`` and
``cosine`` take all parameters as one vector.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.budget import Budget
from engine.hardware import load_profile
from engine.planner import forecast
from engine.runtime import execute
from engine.tensors import dtype_name
from stages.dense import dense_gradient
from stages.groups import Group, StepGroup
from stages.rollouts import read_rollouts
from stages.space import GrpoSpace
from stages.step_record import rollouts_file

TOLERANCE = {
    torch.float64: 1e-10,  # of max_rel_err: rounding alone, at any chunking
    torch.float32: 1e-4,  # of l2_rel_err
    torch.bfloat16: 1e-1,  # of l2_rel_err: two bfloat16 gradients differ by as much as each does from the truth
}
_FLOOR = 1e-6
Gradients = Mapping[str, torch.Tensor]


def audit(space: GrpoSpace, budget: Budget) -> dict[str, object]:
    """Return the figures of ``engine audit``: errors of the planned gradient and of stop-prompt, and a verdict.

    A plan with ``gradient="stop-prompt"`` is judged like any other, and fails.
    """
    settings = replace(space.settings, loss=space.groups.loss)  # one norm for sampled and given groups
    space = replace(space, settings=settings)
    planned, groups = engine_gradient(space, space.steps[0], budget, space.settings.gradient)
    stopped, _ = engine_gradient(space, groups, budget, "stop-prompt")
    _, reference = dense_gradient(space.policy, groups, space.settings)
    dtype = space.settings.dtype
    report: dict[str, object] = {
        "max_rel_err": max_rel_err(planned, reference),
        "l2_rel_err": l2_rel_err(planned, reference),
        "cosine": cosine(planned, reference),
        "stop_prompt": {"cosine": cosine(stopped, reference), "l2_rel_err": l2_rel_err(stopped, reference)},
        "dtype": dtype_name(dtype),
        "tolerance": TOLERANCE[dtype],
    }
    judged = report["max_rel_err"] if dtype is torch.float64 else report["l2_rel_err"]
    report["passed"] = bool(judged <= TOLERANCE[dtype])  # type: ignore[operator]
    return report


def engine_gradient(
    space: GrpoSpace, step: Sequence[StepGroup], budget: Budget, gradient: str
) -> tuple[dict[str, torch.Tensor], tuple[Group, ...]]:
    """Execute one step up to the merge; return its gradients by parameter name and its groups, sampled ones as given.

    Gradients are in the accumulators' dtype.
    """
    settings = replace(
        space.settings,
        gradient=gradient,
        epochs_per_step=1,
        optimizer_state=None,
        save_optimizer=False,
        update_weights=False,
    )
    variant = replace(space, steps=(tuple(step),), settings=settings)
    with tempfile.TemporaryDirectory(prefix="longstraw-audit-") as folder:
        file = Path(folder) / "gradients.safetensors"
        planned = forecast(variant.lower(variant.first()), budget, load_profile("cpu"))
        execute(planned, Path(folder) / "run", wanted={"gradients": str(file)})
        sampled = iter(_sampled_groups(variant, Path(folder) / "run" / "results"))
        groups = tuple(group if isinstance(group, Group) else next(sampled) for group in step)
        return dict(load_file(file)), groups


def _sampled_groups(space: GrpoSpace, results: Path) -> list[Group]:
    """Return what a run sampled, as groups whose old log-probabilities are to be recomputed."""
    if not space.groups.samples:
        return []
    vocab = int(space.policy.config.vocab_size)
    groups = read_rollouts(results / rollouts_file(0), tokenizer=space.tokenizer, vocab_size=vocab)
    return [
        replace(group, responses=tuple(replace(response, old_logprobs=None) for response in group.responses))
        for group in groups
    ]


def max_rel_err(found: Gradients, reference: Gradients) -> float:
    """Return the largest error of any parameter relative to that parameter's largest entry."""
    largest = max(tensor.abs().max().item() for tensor in reference.values())
    worst = 0.0
    for name, expected in reference.items():
        scale = max(expected.abs().max().item(), _FLOOR * largest)
        error = (found[name] - expected).abs().max().item()
        worst = max(worst, error / scale if scale else error)
    return worst


def l2_rel_err(found: Gradients, reference: Gradients) -> float:
    """Return the norm of the difference over the norm of the reference, all parameters as one vector."""
    difference = math.fsum(_dot(found[name] - reference[name], found[name] - reference[name]) for name in reference)
    norm = math.fsum(_dot(tensor, tensor) for tensor in reference.values())
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def cosine(found: Gradients, reference: Gradients) -> float | None:
    """Return the cosine between two gradients, None where one of them is zero."""
    inner = math.fsum(_dot(found[name], reference[name]) for name in reference)
    squares = [math.fsum(_dot(g[name], g[name]) for name in reference) for g in (found, reference)]
    return inner / math.sqrt(squares[0] * squares[1]) if all(squares) else None


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.dot(a.flatten().double(), b.flatten().double()).item()
