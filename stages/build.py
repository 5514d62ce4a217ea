"""How a GRPO run becomes a plan, once its choices are made.

The stages, in order: load the weights, and the optimizer's state where it is kept. Then, step by step: the prompts'
prefill; where responses are sampled, rollouts, rewards, advantages and the rollouts file; and for every epoch of the
step the scores of all groups, the loss, the backward of every group (replay, sweep), last group first, whose state is
most likely still at hand; merge, clip, AdamW, metrics. Checkpoints come after the steps that ask for one.

From the second epoch on the prompts are prefilled again, since the weights have changed; the rollouts are not.

Invariant: names of Values that a user's own stage may read (weights, rollouts, rewards, advantages) are the same under
all choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.budget import Tier
from engine.plan import ActualSizes, Choices, Cost, Plan, Stage, Tap, TensorSpec, Value, ValueKind, digest
from engine.worker import dtype_name
from models.dense import HEAD_GRADIENT
from models.float64 import accumulation_dtype
from models.geometry import geometry, state_layout
from stages import checkpoint, names
from stages.compute import HeadOptions
from stages.groups import Group, StepGroup
from stages.learning_rate import learning_rate_at
from stages.loss_stage import LossStage, loss_groups
from stages.losses import LossConfig
from stages.lower import Lowering, Visible
from stages.optimizer import load_stage, save_stage
from stages.recall import sample_or_recall
from stages.record import ROLLOUTS_FOLDER, MetricsLine, RolloutsFile, file_value
from stages.rewards import SampledGroup
from stages.sampling import SampleWork, SamplingOptions, add_rollout, rollout_value
from stages.update import adamw_stage, clip_stage, clip_value, merge_stage

if TYPE_CHECKING:
    from stages.space import GrpoSpace


class RunBuilder:
    """Lowers the ``steps`` of a run, by number, under given choices."""

    def __init__(self, space: GrpoSpace, choices: Choices, steps: Sequence[int]) -> None:
        self.steps = steps
        self.space, self.settings, self.policy, self.choices = space, space.settings, space.policy, choices
        self.parameters = space.estimator.parameters()
        self.tied = HEAD_GRADIENT not in self.parameters
        self.wide = accumulation_dtype(self.settings.dtype)
        self.plan = Plan(
            name=space.name,
            choices={**choices, "page_tokens": self.settings.page_tokens},
            settings=self._fingerprint(),
            space=space,
            notes=[*self._weights_notes(), *self._group_notes()],
        )
        self.sizes = geometry(
            self.policy.config,
            layer_parameters=sum(spec.num_elements for name, spec in self.parameters.items() if ".layers." in name),
            dtype=self.settings.dtype,
        )
        self.layout = state_layout(self.sizes, dtype=self.settings.dtype, page_tokens=self.settings.page_tokens)
        self.lowerings: list[Lowering] = []
        self.optimizer = self.space.optimizer_state(self.parameters, kept=self._keeps_optimizer())

    def build(self) -> Plan:
        """Return the plan."""
        self._add_weights()
        if self.settings.update_weights:
            for value in self.optimizer.values():
                self.plan.value(value)
            if self.optimizer.source is not None:
                self.plan.add(load_stage(self.optimizer, name="load optimizer", weights=names.WEIGHTS))
        for step in self.steps:
            _StepBuilder(self, step).build()
            self._add_checkpoints(step)
        if self.space.samples:
            self.plan.hooks["actual"] = self.actual_sizes
            self.plan.keep_results = (ROLLOUTS_FOLDER,)
        first = names.update_prefix(0, 0, self.settings.epochs_per_step)
        gradients = names.gradients(first)
        self.plan.taps["gradients"] = Tap(
            after=f"merge {first.rstrip('/')}",
            run=lambda context, path: checkpoint.save_gradients(context, path, gradients),
        )
        return self.plan

    def actual_sizes(self) -> ActualSizes:
        """Return the sizes of what was planned at its largest, now that it is known how much was sampled."""
        workspace_bytes: dict[str, int] = {}
        for lowering in self.lowerings:
            workspace_bytes |= lowering.workspace_at(self.space.sampled.lengths)
        values = {name: file_value(name, nbytes) for name, nbytes in self.space.sampled.file_bytes.items()}
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
            "rollouts": digest([[_group_data(group) for group in groups] for groups in self.space.steps]),
            "gradient": settings.gradient,
            "loss": asdict(settings.loss),
            "optimizer": asdict(settings.optimizer),
            "epochs_per_step": settings.epochs_per_step,
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
        if computed.itemsize >= stored.itemsize:
            return []
        return [
            f"the policy is in {dtype_name(stored)} and is computed in {dtype_name(computed)}: its weights are rounded "
            "when they are loaded, and the new checkpoint holds the rounded ones"
        ]

    def _group_notes(self) -> list[str]:
        known = [entry for step in self.space.advantages for entry in step if entry is not None]
        return [note for entry in known for note in entry.notes]

    def _add_weights(self) -> None:
        policy, dtype, seed = self.policy, self.settings.dtype, self.settings.seed
        weights = self.plan.value(
            Value(
                name=names.WEIGHTS,
                tensors={**self.parameters, **self.space.estimator.buffers()},
                kind=ValueKind.ORDERED,
                tiers=(Tier.DEVICE,),
                provided=True,
            )
        )
        self.plan.add(
            Stage(
                name="load",
                kind="load",
                run=lambda context: checkpoint.load(context, policy, dtype, seed),
                config={"policy": policy.fingerprint, "dtype": dtype_name(dtype), "seed": seed},
                writes=(names.WEIGHTS,),
                workspace_bytes=self.space.load_workspace_bytes,
                cost=Cost(moved_bytes=float(weights.nbytes) * 3),
            )
        )

    def _add_checkpoints(self, step: int) -> None:
        """Add what a step leaves: the last one always a checkpoint, others where the settings ask for it."""
        last = step == len(self.space.steps) - 1
        every = self.settings.checkpoint_every
        if not self.settings.update_weights or not (last or (every is not None and (step + 1) % every == 0)):
            return
        suffix = "" if last else f"-{step + 1}"
        self._add_checkpoint(f"{names.CHECKPOINT}{suffix}")
        if self.settings.save_optimizer:
            self._add_saved_optimizer(f"{names.OPTIMIZER}{suffix}", step)

    @property
    def _checkpoint_dtype(self) -> torch.dtype:
        """The dtype of the policy that came in."""
        return self.policy.default_dtype() if self.policy.location is not None else self.settings.dtype

    def _add_saved_optimizer(self, name: str, step: int) -> None:
        stage, value = save_stage(
            self.optimizer,
            name=name,
            path=f"{name}.safetensors",
            weights=names.WEIGHTS,
            updates=(step + 1) * self.settings.epochs_per_step,
            checkpoint_dtype=self._checkpoint_dtype,
        )
        self.plan.value(value)
        self.plan.add(stage)

    def _add_checkpoint(self, name: str) -> None:
        policy, tokenizer, dtype = self.policy, self.space.tokenizer, self._checkpoint_dtype
        nbytes = checkpoint.checkpoint_bytes(self.parameters, policy, dtype.itemsize)
        copied = sum(spec.num_elements for spec in self.parameters.values()) * dtype.itemsize
        self.plan.value(
            Value(
                name=name,
                tensors={"files": TensorSpec(shape=(nbytes,), dtype="uint8")},
                tiers=(Tier.DISK,),
                provided=True,
                keep=True,
            )
        )
        self.plan.add(
            Stage(
                name=name,
                kind="checkpoint",
                run=lambda context: checkpoint.save(context, policy, tokenizer, dtype, name),
                config={"dtype": dtype_name(dtype)},
                reads=(names.WEIGHTS,),
                writes=(name,),
                workspace_bytes=0 if dtype is self.settings.dtype else copied,
                cost=Cost(moved_bytes=float(nbytes)),
            )
        )


class _StepBuilder:
    """Adds one step: what is sampled, then its updates."""

    def __init__(self, run: RunBuilder, step: int) -> None:
        self.run, self.step = run, step
        self.plan, self.space, self.settings = run.plan, run.space, run.settings
        self.sampled = {item.group: item for item in self.space.sampled_groups(step)}
        self.groups = loss_groups(self.space.steps[step], self.space.advantages[step], list(self.sampled.values()))
        self.first: Lowering | None = None

    def build(self) -> None:
        for epoch in range(self.settings.epochs_per_step):
            self._add_update(epoch)

    def _add_update(self, epoch: int) -> None:
        update = names.update_prefix(self.step, epoch, self.settings.epochs_per_step)
        lowering = self._lowering(update)
        self._declare_gradients(update)
        trees = self.space.trees(self.step, update)
        states = [lowering.forward_prompt(tree) for _, tree in trees]
        if epoch == 0 and self.sampled:
            self._add_rollouts([(index, state) for (index, _), state in zip(trees, states, strict=True)])
        for (_, tree), state in zip(trees, states, strict=True):
            lowering.forward_below((tree,), state)
        self._add_loss(update, lowering)
        self.first = self.first or lowering
        self.run.lowerings.append(lowering)
        for _, tree in reversed(trees):
            lowering.backward((tree,))
        self._add_optimizer_stages(update, epoch)

    def _lowering(self, update: str) -> Lowering:
        run, choices = self.run, self.run.choices
        return Lowering(
            plan=self.plan,
            update=update,
            sizes=run.sizes,
            layout=run.layout,
            head=HeadOptions(
                temperature=float(self.settings.temperature),
                block_rows=choices["head_rows"],
                uses_entropies=bool(self.settings.loss.entropy_bonus),
            ),
            estimator=self.space.estimator,
            chunk_tokens=choices["chunk_tokens"],
            branches_at_once=choices["branches_at_once"],
            exact=self.settings.gradient == "exact",
            tied_head=run.tied,
        )

    def _declare_gradients(self, update: str) -> None:
        run, wide = self.run, dtype_name(self.run.wide)
        gradients = {name: TensorSpec(shape=spec.shape, dtype=wide) for name, spec in run.parameters.items()}
        found = {names.gradients(update): gradients}
        if run.tied:
            shape = (run.sizes.vocab, run.sizes.hidden)
            found[names.head_gradients(update)] = {HEAD_GRADIENT: TensorSpec(shape=shape, dtype=wide)}
        for name, tensors in found.items():
            self.plan.value(Value(name=name, tensors=tensors, kind=ValueKind.ACCUMULATOR, tiers=(Tier.DEVICE,)))

    # Rollouts

    def _add_rollouts(self, states: list[tuple[int, Visible]]) -> None:
        """Sample every group from its prompt's state, then reward, and write the step's rollouts file."""
        for index, state in states:
            if index in self.sampled:
                self._add_waves(self.sampled[index], state)
        for group in self.sampled.values():
            for value in group.values():
                self.plan.value(value)
            for stage in group.stages():
                self.plan.add(stage)
        file = RolloutsFile(step=self.step, groups=tuple(self.sampled.values()), sampled=self.space.sampled)
        self.plan.value(file.value)
        self.plan.add(file.stage())

    def _add_waves(self, group: SampledGroup, state: Visible) -> None:
        options = SamplingOptions(
            max_response_tokens=group.rollout.max_response_tokens,
            temperature=float(self.settings.temperature),
            stop_token_ids=group.stop_token_ids,
            greedy=group.rollout.greedy,
            seed=self.settings.seed,
        )
        rollout = names.rollout(group.step, group.group)
        self.plan.value(rollout_value(rollout, group.rollout.group_size, options, dtype_name(self.settings.dtype)))
        size = self.run.choices["branches_at_once"]
        for first in range(0, group.rollout.group_size, size):
            wave = tuple(range(first, min(first + size, group.rollout.group_size)))
            name = f"{group.name}/response{wave[0]}" + (f"-response{wave[-1]}" if len(wave) > 1 else "")
            work = SampleWork(
                name=name,
                rollout=rollout,
                opening_id=group.prompt.token_ids[-1],
                first_position=len(group.prompt.token_ids) - 1,
                visible=state,
                responses=wave,
                step=group.step,
                group=group.group,
                options=options,
                layout=self.run.layout,
                head_rows=self.run.choices["head_rows"],
            )
            add_rollout(
                self.plan,
                work,
                sizes=self.run.sizes,
                estimator=self.space.estimator,
                run=partial(sample_or_recall, work),
            )

    # Loss and update

    def _loss_config(self) -> LossConfig:
        """Return the loss; its norm by the longest response is, where responses are sampled, by the longest allowed."""
        config, rollout = self.settings.loss, self.space.rollout
        if not self.sampled or rollout is None or config.max_response_tokens is not None:
            return config
        return replace(config, max_response_tokens=rollout.max_response_tokens)

    def _add_loss(self, update: str, lowering: Lowering) -> None:
        loss = LossStage(
            config=self._loss_config(),
            groups=self.groups,
            dtype=self.run.wide,
            works=tuple(lowering.works),
            first=() if self.first is None else tuple(self.first.works),
        )
        groups = self.space.steps[self.step]
        self.plan.add(
            Stage(
                name=f"loss {update.rstrip('/')}",
                kind="loss",
                run=loss.run,
                config={"loss": asdict(loss.config), "rollouts": digest([_group_data(group) for group in groups])},
                reads=loss.reads,
                writes=loss.writes,
                workspace_bytes=self.space.loss_workspace_bytes(loss),
                cost=Cost(num_kernels=100),
            )
        )

    def _add_optimizer_stages(self, update: str, epoch: int) -> None:
        run, options, ending = self.run, self.settings.optimizer, update.rstrip("/")
        gradients, clip = names.gradients(update), names.clip(update)
        head = names.head_gradients(update) if run.tied else None
        self.plan.add(merge_stage(name=f"merge {ending}", gradients=gradients, head_gradients=head))
        if not self.settings.update_weights:
            self._add_metrics(update, epoch, None, after=gradients)
            return
        number = self.step * self.settings.epochs_per_step + epoch
        rate = self._learning_rate(number)
        self.plan.value(clip_value(clip, self.settings.dtype))
        self.plan.add(
            clip_stage(
                name=f"clip {ending}",
                gradients=self.plan.values[gradients],
                clip=clip,
                max_grad_norm=options.max_grad_norm,
            )
        )
        self.plan.add(
            adamw_stage(
                run.optimizer,
                name=f"adamw {ending}",
                update=number,
                gradients=gradients,
                clip=clip,
                weights=names.WEIGHTS,
                options=options,
                learning_rate=rate,
            )
        )
        self._add_metrics(update, epoch, rate, after=names.WEIGHTS)

    def _learning_rate(self, number: int) -> float:
        return learning_rate_at(
            number,
            total=self.run.num_updates,
            peak=self.settings.optimizer.learning_rate,
            warmup=self.settings.warmup_updates,
            schedule=self.settings.schedule,
        )

    def _add_metrics(self, update: str, epoch: int, learning_rate: float | None, *, after: str) -> None:
        line = MetricsLine(step=self.step, epoch=epoch, update=update, learning_rate=learning_rate)
        self.plan.add(line.stage(after))


def _group_data(group: StepGroup) -> list[object]:
    if isinstance(group, Group):
        return [list(group.prompt_ids), [list(asdict(response).values()) for response in group.responses]]
    return [list(group.token_ids), repr(group.data)]
