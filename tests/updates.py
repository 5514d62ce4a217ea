"""Optimizer updates without a model: a plan of load, gradients, clip and AdamW over a handful of odd parameters.

The gradient of an update depends on the weights, so that what one update gets wrong the next ones carry on. Whatever
the weights' dtype, it is computed in the accumulation dtype from the weights as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine.budget import Budget, Tier
from engine.context import StageContext
from engine.hardware import load_profile
from engine.plan import Plan, Stage, TensorSpec, Value, ValueKind
from engine.planner import forecast
from engine.runtime import Outcome, execute
from engine.tensors import dtype_name
from models.float64 import accumulation_dtype
from stages import AdamWOptions
from stages.optimizer import OptimizerState, load_stages, save_stage
from stages.optimizer_file import read_optimizer_file
from stages.update import adamw_stage, clip_stage, clip_value, merge_stage, norms_stage, norms_value
from tests.helpers import Gradients, budget

SHAPES = {"embed": (37, 24), "norm": (24,), "up.weight": (50, 24), "up.bias": (5,), "scale": (1,), "head": (11, 7)}
# Sizes that no vector width divides, one number alone, and one parameter of more than half of all numbers.


def first_weights(dtype: torch.dtype, seed: int = 0) -> Gradients:
    """Return random weights of these shapes."""
    numbers = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=numbers, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def gradient_of(weights: Mapping[str, torch.Tensor], update: int) -> Gradients:
    """Return the gradients of an update: some of the weights, and noise of its own."""
    numbers = torch.Generator().manual_seed(100 + update)
    found = {}
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=numbers, dtype=torch.float64)
        wide = accumulation_dtype(weight.dtype)
        found[name] = weight.detach().to(wide) * 0.5 + noise.to(wide)
    return found


class _Weights:
    """Stands in for a loaded model: its parameters, under their names."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
        self.hf = SimpleNamespace(named_parameters=lambda: list(self.tensors.items()))


@dataclass(kw_only=True)
class Updates:
    """A run of ``len(rates)`` updates from ``weights``; update numbers go on from those of ``source``."""

    weights: Gradients
    rates: Sequence[float]
    options: AdamWOptions = field(default_factory=AdamWOptions)
    kept: bool = True
    source: Path | None = None
    save_for: torch.dtype | None = None  # the dtype of the checkpoint that the state is saved with
    gradient: Callable[[Mapping[str, torch.Tensor], int], Gradients] = gradient_of

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    def state(self) -> OptimizerState:
        spec = {
            name: TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
            for name, tensor in self.weights.items()
        }
        source = None if self.source is None else read_optimizer_file(self.source)
        return OptimizerState(parameters=spec, dtype=self.dtype, kept=self.kept, source=source)

    def plan(self) -> Plan:
        state, plan = self.state(), Plan(name="updates")
        on_device = (Tier.DEVICE,)
        ordered = ValueKind.ORDERED
        plan.value(
            Value(name="weights", tensors=state.parameters, kind=ordered, tiers=on_device, provided=True, keep=True)
        )
        for value in state.values():
            plan.value(value)
        plan.add(Stage(name="load", kind="load", run=self._load, writes=("weights",)))
        if state.source is not None:
            for stage in load_stages([state], name="load optimizer"):
                plan.add(stage)
        for update in range(len(self.rates)):
            self._add_update(plan, state, update)
        if self.save_for is not None:
            stage, value = save_stage(
                [state],
                name="optimizer",
                path="saved/optimizer.safetensors",
                updates=len(self.rates),
                checkpoint_dtype=self.save_for,
            )
            plan.value(value)
            plan.add(stage)
        return plan

    def _load(self, context: StageContext) -> None:
        item = _Weights(self.weights)
        context.provide("weights", (tensor.detach() for tensor in item.tensors.values()), item=item)

    def _add_update(self, plan: Plan, state: OptimizerState, update: int) -> None:
        number = state.first_count + update
        wide = dtype_name(state.wide)
        specs = {name: TensorSpec(shape=spec.shape, dtype=wide) for name, spec in state.parameters.items()}
        gradients = plan.value(
            Value(name=f"gradients{update}", tensors=specs, kind=ValueKind.ACCUMULATOR, tiers=(Tier.DEVICE,))
        )

        def make(context: StageContext) -> None:
            tensors = context.item("weights").tensors
            for name, gradient in self.gradient(tensors, number).items():
                context.tensors(gradients.name)[name].add_(gradient)

        plan.add(
            Stage(
                name=f"make{update}",
                kind="work",
                run=make,
                reads=("weights",),
                updates=(gradients.name,),
                workspace_bytes=10 * gradients.nbytes,
            )
        )
        plan.add(merge_stage(name=f"merge{update}", gradients={gradients.name: state}))
        norms = plan.value(norms_value(f"norms{update}", state))
        plan.add(norms_stage(name=f"norms{update}", gradients=gradients.name, layout=state, norms=norms.name))
        clip = plan.value(clip_value(f"clip{update}", self.dtype))
        limit = self.options.max_grad_norm
        plan.add(clip_stage(name=f"clip{update}", norms=[norms.name], clip=clip.name, max_grad_norm=limit))
        plan.add(
            adamw_stage(
                state,
                name=f"adamw{update}",
                update=update,
                gradients=gradients.name,
                clip=f"clip{update}",
                weights="weights",
                options=self.options,
                learning_rate=self.rates[update],
            )
        )

    def run(self, folder: Path, within: Budget | None = None) -> Updated:
        """Run in the new directory ``folder`` and return the new weights and what was measured."""
        plan = self.plan()
        kept: dict[str, Any] = {}  # arrays, which no other stage's device bytes hold, whatever runs after this one

        def keep(context: StageContext) -> None:
            tensors = context.item("weights").tensors.items()
            kept.update({name: tensor.detach().view(torch.uint8).numpy().copy() for name, tensor in tensors})

        plan.add(Stage(name="look", kind="work", run=keep, reads=("weights",)))
        outcome = execute(forecast(plan, within or budget(), load_profile("cpu")), folder)
        weights = {name: torch.from_numpy(array).view(self.dtype) for name, array in kept.items()}
        return Updated(weights=weights, outcome=outcome, plan=plan)


@dataclass(frozen=True, kw_only=True)
class Updated:
    """What a run of updates left."""

    weights: Gradients
    outcome: Outcome
    plan: Plan

    @property
    def file(self) -> Path:
        """The optimizer file that was saved."""
        return Path(self.outcome.results["optimizer"])
