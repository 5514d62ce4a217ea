"""From accumulated gradients to new weights: merge, clip, AdamW.

The merge adds the head's share of a tied embedding to the look-up's share. The clip is two passes: norms per
parameter, summed in the parameters' order; the factor is applied inside the optimizer, so that no scaled copy of the
gradients exists. AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) is torch's own fused kernel, run on
slices of a parameter so that moments and masters of one slice are alive at a time. Weights below float32 are updated
through a float32 master.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from engine.errors import StageFailedError, UsageError
from engine.worker import StageContext
from models.dense import EMBEDDING_GRADIENT, HEAD_GRADIENT
from models.float64 import accumulation_dtype
from stages import names

SLICE_ELEMENTS = 2**20
# Parameters are updated this many elements at a time: large enough that Python does not count, small enough
# that moments, master and scaled gradient of a slice (16 MiB in float32) hide in any stage's workspace.

SCALARS_BYTES = 4096
# Norms and step counters: a few numbers, rounded up.


@dataclass(frozen=True, kw_only=True)
class AdamWOptions:
    """AdamW's numbers. ``max_grad_norm`` of 0 means no clipping."""

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, math.inf),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("eps", 0.0, math.inf),
            ("weight_decay", 0.0, math.inf),
            ("max_grad_norm", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and low <= value and value < high):
                raise UsageError(f"{name}={value!r} must be a number of at least {low} and below {high}")


def merge(context: StageContext) -> None:
    """Add the head's share of a tied embedding's gradient to the look-up's share, in place."""
    if names.HEAD_GRADIENTS in context.stage.reads:
        head = context.tensors(names.HEAD_GRADIENTS)[HEAD_GRADIENT]
        context.tensors(names.GRADIENTS)[EMBEDDING_GRADIENT].add_(head)


def global_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """Return the Euclidean norm of all gradients together: per-parameter norms, summed in order in float64."""
    return math.sqrt(math.fsum(torch.linalg.vector_norm(gradient).item() ** 2 for gradient in gradients.values()))


def clip(context: StageContext, options: AdamWOptions) -> None:
    """Report the gradients' norm and write the factor that brings it down to ``max_grad_norm``.

    Raises:
        StageFailedError: a gradient is not finite.
    """
    norm = global_norm(context.tensors(names.GRADIENTS))
    if not math.isfinite(norm):
        raise StageFailedError(f"the gradient's norm is {norm}; check the weights, the inputs and the dtype")
    limit = options.max_grad_norm
    context.tensors(names.CLIP)["scale"].fill_(min(1.0, limit / (norm + 1e-6)) if limit else 1.0)
    context.results["grad_norm"] = norm


def adamw_workspace_bytes(largest_parameter: int, dtype: torch.dtype) -> int:
    """Return the device bytes that `adamw_step` needs: scaled gradient, two moments and, below float32, a master."""
    wide = accumulation_dtype(dtype)
    tensors = 3 + (wide is not dtype)
    return tensors * min(SLICE_ELEMENTS, largest_parameter) * wide.itemsize + SCALARS_BYTES


def adamw_step(context: StageContext, options: AdamWOptions) -> None:
    """Update the weights in place by one AdamW step from fresh moments."""
    gradients = context.tensors(names.GRADIENTS)
    scale = context.tensors(names.CLIP)["scale"]
    model = context.item(names.WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            for weight, gradient in _slices(parameter, gradients[name]):
                _update_slice(weight, gradient, scale, options)


def _slices(parameter: torch.Tensor, gradient: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    flat, flat_gradient = parameter.detach().view(-1), gradient.view(-1)
    for start in range(0, flat.numel(), SLICE_ELEMENTS):
        yield flat[start : start + SLICE_ELEMENTS], flat_gradient[start : start + SLICE_ELEMENTS]


def _update_slice(weight: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor, options: AdamWOptions) -> None:
    master = weight if weight.dtype is gradient.dtype else weight.to(gradient.dtype)
    moments: Any = [torch.zeros_like(gradient), torch.zeros_like(gradient)]
    adamw(
        [master],
        [gradient * scale],
        [moments[0]],
        [moments[1]],
        [],
        [torch.zeros((), dtype=torch.float32)],
        foreach=False,
        fused=True,
        amsgrad=False,
        beta1=options.beta1,
        beta2=options.beta2,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=False,
    )
    if master is not weight:
        weight.copy_(master)
    if not bool(torch.linalg.vector_norm(weight, math.inf).isfinite()):
        raise StageFailedError(f"new weights are not finite; lower learning_rate={options.learning_rate!r}")
