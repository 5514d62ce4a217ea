"""How a GRPO run becomes a plan, once its choices are made.

Load the weights, and the optimizer's state where it comes from a file; then step by step (`stages.build_step`), with a
checkpoint behind the steps that ask for one.

Invariant: names of Values that a user's own stage may read (weights, rollouts, rewards, advantages) are the same under
all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch

from engine.context import StageContext
from engine.plan import ActualSizes, Choices, Plan, Stage, Tap, Value, ValueKind
from engine.tensors import dtype_name
from models.dense import HEAD_GRADIENT
from models.float64 import accumulation_dtype
from models.geometry import state_layout
from stages import names, shard_files
from stages.build_step import StepBuilder
from stages.files import file_value
from stages.lower import Lowering
from stages.model_parts import CutModel, ModelParts, WholeModel
from stages.optimizer import load_stages, save_stage
from stages.step_record import ROLLOUTS_FOLDER

if TYPE_CHECKING:
    from stages.space import GrpoSpace


class RunBuilder:
    """Lowers the ``steps`` of a run, by number, under given choices; an outline has each kind of layer span once."""

    def __init__(self, space: GrpoSpace, choices: Choices, steps: Sequence[int], *, is_outline: bool = False) -> None:
        self.steps = steps
        self.space, self.settings, self.policy, self.choices = space, space.settings, space.policy, choices
        self.parameters = space.estimator.parameters()
        self.tied = HEAD_GRADIENT not in self.parameters
        whole = space.cut(choices["layer_spans"])
        self.cut = whole.outline() if is_outline else whole
        self.wide = accumulation_dtype(self.settings.dtype)
        self.plan = Plan(
            name=space.name,
            kind=space.kind,
            choices={**choices, "page_tokens": self.settings.page_tokens},
            settings=self._fingerprint(),
            space=space,
            notes=[*self._weights_notes(), *self._length_notes(), *self._group_notes()],
        )
        self.sizes = space.sizes
        self.costs = space.chunk_costs(choices)
        self.layout = state_layout(self.sizes, dtype=self.settings.dtype, page_tokens=self.settings.page_tokens)
        self.lowerings: list[Lowering] = []
        optimizer = self.space.optimizer_state(self.parameters, kept=self._keeps_optimizer())
        self.shards = {
            shard: replace(optimizer, parameters=parameters, shard=shard)
            for shard, parameters in self.cut.shards.items()
        }
        make_model = WholeModel if self.cut.is_whole else CutModel
        self.model: ModelParts = make_model(
            policy=self.policy, seed=self.settings.seed, shards=self.shards, estimator=space.estimator
        )

    def build(self) -> Plan:
        """Return the plan."""
        for value, stage in self.model.load():
            self._add(value, stage)
        if self.settings.update_weights:
            self._add_optimizer()
        for step in self.steps:
            StepBuilder(self, step).build()
            self._add_checkpoints(step)
        if self.space.groups.samples:
            self.plan.hooks["actual"] = self.actual_sizes
            self.plan.kept_folders = (ROLLOUTS_FOLDER,)
        self.plan.taps["gradients"] = self._gradients_tap()
        return self.plan

    def _gradients_tap(self) -> Tap:
        """Return what writes the gradients of the first update."""
        update = names.update_prefix(0, 0, self.settings.epochs_per_step)
        gradients = {names.gradients(update, shard): state for shard, state in self.shards.items()}

        def write(context: StageContext, path: str) -> None:
            shard_files.save_gradients(context, path, gradients)

        return Tap(after=f"merge {update.rstrip('/')}", run=write)

    def _add(self, value: Value, stage: Stage) -> None:
        self.plan.value(value)
        self.plan.add(stage)

    def _add_optimizer(self) -> None:
        """Declare the optimizer's state, and hold its source, if any, against the weights."""
        states = list(self.shards.values())
        for state in states:
            for value in state.values():
                self.plan.value(value)
        if self.settings.optimizer_state is not None:
            for stage in load_stages(states, name="load optimizer"):
                self.plan.add(stage)

    def actual_sizes(self) -> ActualSizes:
        """Return the sizes of what was planned at its largest, now that it is known how much was sampled."""
        workspace_bytes: dict[str, int] = {}
        for lowering in self.lowerings:
            workspace_bytes |= lowering.workspace_at(self.space.sampled.lengths)
        files = self.space.sampled.file_bytes.items()
        values = {name: file_value(name, nbytes, kind=ValueKind.ORDERED) for name, nbytes in files}
        return ActualSizes(workspace_bytes=workspace_bytes, values=values)

    @property
    def num_updates(self) -> int:
        """The number of optimizer updates of the run."""
        return len(self.space.steps) * self.settings.epochs_per_step

    def _keeps_optimizer(self) -> bool:
        """Whether the optimizer's state outlives an update; a run of one update without a file needs none."""
        return self.num_updates > 1 or self.settings.save_optimizer or self.settings.optimizer_state is not None

    def _fingerprint(self) -> dict[str, object]:
        settings, rollout = self.settings, self.space.rollout
        return {
            "policy": self.policy.fingerprint,
            "rollouts": self.space.groups.digest,
            "gradient": settings.gradient,
            "loss": asdict(settings.loss),
            "optimizer": asdict(settings.optimizer),
            "epochs_per_step": settings.epochs_per_step,
            "first_step": settings.first_step,
            "schedule": settings.schedule,
            "warmup_updates": settings.warmup_updates,
            "dtype": dtype_name(settings.dtype),
            "temperature": float(settings.temperature),
            "seed": settings.seed,
            "baseline": settings.baseline,
            "sampling": None if rollout is None else [rollout.group_size, rollout.max_response_tokens, rollout.greedy],
        }

    def _weights_notes(self) -> list[str]:
        stored, computed = self.policy.default_dtype(), self.settings.dtype
        if self.policy.location is None:
            return [
                f"the policy is a configuration alone: its weights are random, drawn from seed {self.settings.seed}"
            ]
        notes = []
        if self.policy.has_other_parts:
            notes.append(
                "the policy has other parts than its text model, such as vision: they are left alone, and the new "
                "checkpoint is that of a text model"
            )
        if computed.itemsize >= stored.itemsize:
            return notes
        return [
            *notes,
            f"the policy is in {dtype_name(stored)} and is computed in {dtype_name(computed)}: its weights are rounded "
            "when they are loaded, and the new checkpoint holds the rounded ones",
        ]

    def _length_notes(self) -> list[str]:
        limit = getattr(self.policy.config, "max_position_embeddings", None)
        longest = self.space.groups.longest_sequence_tokens()
        if not isinstance(limit, int) or longest <= limit:
            return []
        return [
            f"sequences of up to {longest} tokens are longer than the {limit} positions that the policy was made for "
            "(max_position_embeddings)"
        ]

    def _group_notes(self) -> list[str]:
        known = [entry for step in self.space.groups.advantages for entry in step if entry is not None]
        return [note for entry in known for note in entry.notes]

    def _add_checkpoints(self, step: int) -> None:
        """Add what a step leaves: the last one always a checkpoint, others where the settings ask for it."""
        last = step == len(self.space.steps) - 1
        every = self.settings.checkpoint_every
        if not self.settings.update_weights or not (last or (every is not None and (step + 1) % every == 0)):
            return
        suffix = "" if last else f"-{step + 1}"
        self._add(*self.model.checkpoint(f"{names.CHECKPOINT}{suffix}", self._checkpoint_dtype, self.space.tokenizer))
        if self.settings.save_optimizer:
            self._add_saved_optimizer(f"{names.OPTIMIZER}{suffix}", step)

    @property
    def _checkpoint_dtype(self) -> torch.dtype:
        """The dtype of the policy that came in."""
        return self.policy.default_dtype() if self.policy.location is not None else self.settings.dtype

    def _add_saved_optimizer(self, name: str, step: int) -> None:
        stage, value = save_stage(
            list(self.shards.values()),
            name=name,
            path=f"{name}.safetensors",
            updates=(step + 1) * self.settings.epochs_per_step,
            checkpoint_dtype=self._checkpoint_dtype,
        )
        self._add(value, stage)
