"""From accumulated gradients to new weights: merge, clip, AdamW. One optimizer update.

The merge adds what a tied embedding has beside its own accumulator: the head's share, or the look-up's. The clip is
two passes: norms per parameter, summed in the parameters' order; the factor is applied inside the optimizer, so that no
scaled copy of the gradients exists. AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) is torch's own fused
kernel, run on pieces of the state (`stages.optimizer`) and what belongs to them of weights and gradients. Weights below
float32 are the rounding of their masters. Step count and learning rate of an update are known when it is planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from engine.context import StageContext
from engine.errors import StageFailedError, UsageError
from engine.plan import Cost, Stage, TensorSpec, Value
from engine.tensors import dtype_name
from models.dense import EMBEDDING_GRADIENT, HEAD_GRADIENT
from models.float64 import accumulation_dtype
from stages.optimizer import OptimizerState
from stages.sampled import VECTOR_TIERS
from stages.shard_layout import Part, ShardLayout, looked_at

_COUNTER_BYTES = 4
# Adam's step counter is a float32 number for every part, as torch's kernel wants it.
_OPERATORS_A_PART, _OPERATORS_A_PIECE = 9, 6
# Of an update, counted: most cut parts out of pieces.
_OPERATORS_A_NORM = 3
# Of a parameter's norm, counted: it is taken, its place found, and put there.


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


def merge_stage(
    *,
    name: str,
    gradients: Mapping[str, ShardLayout],
    embedding: str = "",
    head_gradients: str | None = None,
    lookup: tuple[str, str] | None = None,
) -> Stage:
    """Return the stage after which ``gradients`` are complete; it adds the other share of a tied embedding in place.

    That is either ``head_gradients``, or ``lookup``: rows and their ids (`stages.lookup`). ``embedding`` is which of
    the gradients have the embedding's. The others are complete now too, so that whoever wants to see them may, piece by
    piece.
    """
    shares = (*filter(None, (head_gradients,)), *(lookup or ()))
    changed = embedding if shares else ""

    def run(context: StageContext) -> None:
        if not changed:
            return
        whole = gradients[changed].of_value(context, changed)[EMBEDDING_GRADIENT]
        if head_gradients is not None:
            whole.add_(context.tensors(head_gradients)[HEAD_GRADIENT])
        if lookup is not None:
            rows, ids = lookup
            whole.index_add_(0, context.tensors(ids)["ids"], context.tensors(rows)["rows"])

    others = {value: layout for value, layout in gradients.items() if value != changed}
    seen, streams = looked_at(others, is_passed=False)
    return Stage(
        name=name,
        kind="merge",
        run=run,
        reads=(*shares, *seen),
        updates=(changed,) if changed else (),
        streams=streams,
    )


def clip_value(name: str, dtype: torch.dtype) -> Value:
    """Return the Value of a clip stage's factor; ``dtype`` is that of the weights."""
    scale = TensorSpec(shape=(1,), dtype=dtype_name(accumulation_dtype(dtype)))
    return Value(name=name, tensors={"scale": scale}, tiers=VECTOR_TIERS)


def norms_value(name: str, layout: ShardLayout) -> Value:
    """Return the Value of the norms of a shard's gradients, a number a parameter."""
    spec = TensorSpec(shape=(len(layout.parameters),), dtype=dtype_name(layout.wide))
    return Value(name=name, tensors={"norms": spec}, tiers=VECTOR_TIERS)


def norms_stage(*, name: str, gradients: str, layout: ShardLayout, norms: str) -> Stage:
    """Return the stage that writes the norm of each parameter's gradient, in the parameters' order."""

    def run(context: StageContext) -> None:
        out = context.tensors(norms)["norms"]
        for index, gradient in enumerate(layout.of_value(context, gradients).values()):
            out[index] = torch.linalg.vector_norm(gradient)

    return Stage(
        name=name,
        kind="norms",
        run=run,
        reads=(gradients,),
        writes=(norms,),
        workspace_bytes=layout.wide.itemsize,
        cost=Cost(
            moved_bytes=float(layout.num_elements * layout.wide.itemsize),
            num_kernels=float(_OPERATORS_A_NORM * len(layout.parameters)),
        ),
    )


def clip_stage(*, name: str, norms: Sequence[str], clip: str, max_grad_norm: float, result: str = "grad_norm") -> Stage:
    """Return the stage that reports the gradients' norm and writes the factor that brings it to ``max_grad_norm``.

    ``norms`` are those of all parameters, in order. It fails if a gradient is not finite.
    """

    def run(context: StageContext) -> None:
        squares = (norm**2 for value in norms for norm in context.tensors(value)["norms"].tolist())
        norm = math.sqrt(math.fsum(squares))
        if not math.isfinite(norm):
            raise StageFailedError(f"the gradient's norm is {norm}; check the weights, the inputs and the dtype")
        scale = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0
        context.tensors(clip)["scale"].fill_(scale)
        context.results[result] = norm

    return Stage(
        name=name,
        kind="clip",
        run=run,
        config={"max_grad_norm": float(max_grad_norm)},
        reads=tuple(norms),
        writes=(clip,),
        cost=Cost(num_kernels=1),
    )


def adamw_stage(
    state: OptimizerState,
    *,
    name: str,
    update: int,
    gradients: str,
    clip: str,
    weights: str,
    options: AdamWOptions,
    learning_rate: float,
) -> Stage:
    """Return the stage that updates the weights in place; ``update`` is its number in the run, from 0.

    It fails if a new weight is not finite.

    Raises:
        ValueError: a second update with a state that is not kept.
    """
    if update and not state.kept:
        raise ValueError(f"update {update} needs the state of the one before it, which is not kept")
    work = _Update(
        state=state,
        is_first=not update,
        count=state.first_count + update,
        names=(gradients, clip, weights),
        options=options,
        learning_rate=learning_rate,
    )
    source = state.source.fingerprint if state.source is not None and not update else ""
    return Stage(
        name=name,
        kind="adamw",
        run=work.run,
        config={"options": asdict(options), "learning_rate": learning_rate, "count": work.count, "source": source},
        reads=(gradients, clip),
        updates=(weights,),
        streams=state.streams(updates=True),
        workspace_bytes=work.workspace_bytes(),
        cost=work.cost(),
    )


@dataclass(frozen=True, kw_only=True)
class _Update:
    """One AdamW update of all weights. ``names`` are those of the gradients, the clip's factor and the weights."""

    state: OptimizerState
    is_first: bool
    count: int
    names: tuple[str, str, str]
    options: AdamWOptions
    learning_rate: float

    def run(self, context: StageContext) -> None:
        state, (gradients_name, clip, weights_name) = self.state, self.names
        gradients, scale = state.of_value(context, gradients_name), context.tensors(clip)["scale"]
        weights = state.of_value(context, weights_name)
        source = state.source if self.is_first else None
        scaled = torch.empty(state.piece_elements, dtype=state.wide, device=context.device)
        with nullcontext() if source is None else source.reading() as reader, torch.no_grad():
            for parts, piece in state.changing(context):
                if self.is_first:
                    state.fill(parts, piece, reader, weights)
                for part in parts:
                    torch.mul(part.of_parameter(gradients), scale, out=part.of_piece(scaled))
                self._update_piece(parts, piece, scaled, weights)

    def _update_piece(
        self, parts: Sequence[Part], piece: torch.Tensor, scaled: torch.Tensor, weights: Mapping[str, torch.Tensor]
    ) -> None:
        targets = [part.of_parameter(weights) for part in parts]
        rows = [[part.of_piece(row) for part in parts] for row in (*piece, scaled)]
        exp_avgs, exp_avg_sqs, *masters, gradients = rows
        self._adamw(masters[0] if masters else targets, gradients, exp_avgs, exp_avg_sqs)
        for target, master in zip(targets, masters[0] if masters else (), strict=bool(masters)):
            target.copy_(master)
        norms = torch.stack([torch.linalg.vector_norm(target) for target in targets]).tolist()
        # not the largest weight: on a CPU that takes fifteen times as long, more than the update itself
        for part, number in zip(parts, norms, strict=True):
            if not math.isfinite(number):
                raise StageFailedError(
                    f"new weights are not finite (in {part.parameter}); lower learning_rate={self.learning_rate!r}"
                )

    def _adamw(self, parameters: Any, gradients: Any, exp_avgs: Any, exp_avg_sqs: Any) -> None:
        options = self.options
        counters = torch.full((len(parameters),), float(self.count), dtype=torch.float32, device=gradients[0].device)
        adamw(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            list(counters.unbind()),
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=self.learning_rate,
            weight_decay=options.weight_decay,
            eps=options.eps,
            maximize=False,
        )

    def workspace_bytes(self) -> int:
        """Return the device bytes beyond Values and buffers: scaled gradients, a piece that is not kept, scalars."""
        state = self.state
        pieces = state.row_bytes + (0 if state.kept else state.piece_bytes)
        norms = 2 * state.most_parts * state.dtype.itemsize
        return pieces + max(state.most_parts * _COUNTER_BYTES, norms)

    def cost(self) -> Cost:
        state = self.state
        elements, kinds = float(state.num_elements), len(state.kinds)
        moved = state.wide.itemsize * (2 * kinds + 4) + 3 * state.dtype.itemsize
        num_parts = sum(map(len, state.pieces))
        num_operators = _OPERATORS_A_PART * num_parts + _OPERATORS_A_PIECE * len(state.pieces)
        return Cost(flops=15 * elements, moved_bytes=moved * elements, num_kernels=float(num_operators))
