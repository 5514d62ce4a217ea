"""How one step of a GRPO run becomes stages: what is sampled, then an update for every epoch.

The prompts' prefill; where responses are sampled, rollouts, rewards, advantages and the rollouts file; the scores of
all groups, the loss, the backward of every group (replay, sweep), last group first, whose state is most likely still at
hand; merge, clip, AdamW, metrics. From the second epoch on the prompts are prefilled again, since the weights have
changed; the rollouts are not.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from engine.plan import Cost, Stage, TensorSpec, ValueKind, movable
from engine.tensors import dtype_name
from models.dense import HEAD_GRADIENT
from stages import names
from stages.compute import HeadOptions
from stages.learning_rate import learning_rate_at
from stages.loss_stage import LossStage, loss_groups
from stages.lower import Lowering, Path
from stages.metrics import MetricsLine
from stages.rewards import SampledGroup
from stages.sampling import SampleWork, SamplingOptions, add_rollout, rollout_value
from stages.spans import gradients_value
from stages.step_record import StepRecord
from stages.update import (
    adamw_stage,
    clip_stage,
    clip_value,
    merge_stage,
    norms_stage,
    norms_value,
)

if TYPE_CHECKING:
    from stages.build import RunBuilder

_LOSS_OPERATORS, _LOSS_OPERATORS_A_CHUNK = 121, 11
# Of a loss with its metrics, counted: operators on vectors, and numbers read from them.


class StepBuilder:
    """Adds one step: what is sampled, then its updates."""

    def __init__(self, run: RunBuilder, step: int) -> None:
        self.run, self.step = run, step
        self.plan, self.space, self.settings = run.plan, run.space, run.settings
        self.sampled = {item.group: item for item in self.space.groups.sampled_groups(step)}
        advantages = self.space.groups.advantages[step]
        self.groups = loss_groups(self.space.steps[step], advantages, list(self.sampled.values()))
        self.record = StepRecord(step=step, groups=tuple(self.sampled.values()), sampled=self.space.sampled)
        self.first: Lowering | None = None

    def build(self) -> None:
        for epoch in range(self.settings.epochs_per_step):
            self._add_update(epoch)

    def _add_update(self, epoch: int) -> None:
        update = names.update_prefix(self.step, epoch, self.settings.epochs_per_step)
        lowering = self._lowering(update)
        self._declare_gradients(update)
        trees = self.space.groups.trees(self.step, update)
        for span in self.run.cut.spans:
            states = [lowering.forward_prompt(tree, span) for _, tree in trees]
            if epoch == 0 and self.sampled:
                self._add_rollouts([(index, state) for (index, _), state in zip(trees, states, strict=True)])
            for (_, tree), state in zip(trees, states, strict=True):
                lowering.forward_below((tree,), state, span)
        self._add_loss(update, lowering)
        self.first = self.first or lowering
        self.run.lowerings.append(lowering)
        if lowering.lookup_apart:
            self.plan.add(self.space.facts.lookups[self.step].stage(update))
        for span in reversed(self.run.cut.spans):
            for _, tree in reversed(trees):
                lowering.backward((tree,), span)
        self._add_optimizer_stages(update, epoch)

    def _lowering(self, update: str) -> Lowering:
        run, choices = self.run, self.run.choices
        return Lowering(
            plan=self.plan,
            update=update,
            sizes=run.sizes,
            costs=run.costs,
            layout=run.layout,
            head=HeadOptions(
                temperature=float(self.settings.temperature),
                block_rows=choices["head_rows"],
                uses_entropies=bool(self.settings.loss.entropy_bonus),
            ),
            estimator=self.space.estimator,
            chunk_tokens=choices["chunk_tokens"],
            branches_at_once=choices["branches_at_once"],
            stored_inputs=choices["stored_inputs"],
            state_tiers=self.settings.state_tiers,
            exact=self.settings.gradient == "exact",
            cut=run.cut,
            shards=run.shards,
            head_apart=run.tied and not self.space.facts.has_few_lookups,
            lookup_apart=run.tied and self.space.facts.has_few_lookups,
        )

    def _declare_gradients(self, update: str) -> None:
        for state in self.run.shards.values():
            self.plan.value(gradients_value(update, state))
        if self.run.tied:
            self._declare_other_share(update, dtype_name(self.run.wide))

    def _declare_other_share(self, update: str, wide: str) -> None:
        """Declare what a tied embedding's gradient has beside the parameters' own accumulator."""
        vocab, hidden = self.run.sizes.vocab, self.run.sizes.hidden
        if self.space.facts.has_few_lookups:
            for value in self.space.facts.lookups[self.step].values(update, hidden=hidden, dtype=wide):
                self.plan.value(value)
            return
        spec = TensorSpec(shape=(vocab, hidden), dtype=wide)
        self.plan.value(movable(names.head_gradients(update), {HEAD_GRADIENT: spec}, kind=ValueKind.ACCUMULATOR))

    # Rollouts

    def _add_rollouts(self, states: list[tuple[int, Path]]) -> None:
        """Sample every group from its prompt's state, record that, reward, and record that."""
        for index, state in states:
            if index in self.sampled:
                self._add_waves(self.sampled[index], state)
        record = self.record
        self.plan.value(record.value)
        self.plan.add(record.rollouts_stage())
        for group in self.sampled.values():
            for value in group.values():
                self.plan.value(value)
            for stage in group.stages(record.of_group):
                self.plan.add(stage)
        self.plan.add(record.rewards_stage())

    def _add_waves(self, group: SampledGroup, state: Path) -> None:
        options = SamplingOptions(
            max_response_tokens=group.rollout.max_response_tokens,
            temperature=float(self.settings.temperature),
            stop_token_ids=group.stop_token_ids,
            greedy=group.rollout.greedy,
            seed=self.settings.seed,
        )
        rollout = group.rollout_name
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
                visible=state.columns,
                edge=state.edge,
                responses=wave,
                step=self.settings.first_step + group.step,
                group=group.group,
                options=options,
                layout=self.run.layout,
                span=self.run.cut.spans[0],
                head_rows=self.run.choices["head_rows"],
            )
            add_rollout(
                self.plan,
                work,
                sizes=self.run.sizes,
                estimator=self.space.estimator,
                run=partial(self.record.sample_or_recall, work),
            )

    # Loss and update

    def _add_loss(self, update: str, lowering: Lowering) -> None:
        loss = LossStage(
            config=self.space.groups.loss,
            groups=self.groups,
            dtype=self.run.wide,
            works=tuple(lowering.works),
            first=() if self.first is None else tuple(self.first.works),
        )
        self.plan.add(
            Stage(
                name=f"loss {update.rstrip('/')}",
                kind="loss",
                run=loss.run,
                config={"loss": asdict(loss.config), "rollouts": self.space.groups.step_digests[self.step]},
                reads=loss.reads,
                writes=loss.writes,
                workspace_bytes=self.space.loss_workspace_bytes(loss),
                cost=Cost(num_kernels=float(_LOSS_OPERATORS + _LOSS_OPERATORS_A_CHUNK * len(loss.works))),
            )
        )

    def _add_optimizer_stages(self, update: str, epoch: int) -> None:
        self._add_merge(update)
        if not self.settings.update_weights:
            self._add_metrics(update, epoch, None, after=names.WEIGHTS)
            return
        self._add_clip(update)
        rate = self._add_adamw(update, epoch)
        self._add_metrics(update, epoch, rate, after=names.clip(update))

    def _add_merge(self, update: str) -> None:
        run, few = self.run, self.space.facts.has_few_lookups
        stage = merge_stage(
            name=f"merge {update.rstrip('/')}",
            gradients={names.gradients(update, shard): state for shard, state in run.shards.items()},
            embedding=names.gradients(update, run.cut.embedding_shard),
            head_gradients=names.head_gradients(update) if run.tied and not few else None,
            lookup=(names.lookup(update), names.lookup_ids(update)) if run.tied and few else None,
        )
        self.plan.add(stage)

    def _add_clip(self, update: str) -> None:
        """Add the stages that take the norms of every shard's gradients, and the one that makes a factor of them."""
        ending, shards = update.rstrip("/"), self.run.shards
        for shard, layout in shards.items():
            value = self.plan.value(norms_value(names.norms(update, shard), layout))
            gradients, name = names.gradients(update, shard), names.of_shard(f"norms {ending}", shard)
            self.plan.add(norms_stage(name=name, gradients=gradients, layout=layout, norms=value.name))
        clip = self.plan.value(clip_value(names.clip(update), self.settings.dtype))
        norms, limit = [names.norms(update, shard) for shard in shards], self.settings.optimizer.max_grad_norm
        self.plan.add(clip_stage(name=f"clip {ending}", norms=norms, clip=clip.name, max_grad_norm=limit))

    def _add_adamw(self, update: str, epoch: int) -> float:
        """Add the stages that update every shard's weights; return their learning rate."""
        number = self.step * self.settings.epochs_per_step + epoch
        rate = self._learning_rate(number)
        for shard, state in self.run.shards.items():
            self.plan.add(
                adamw_stage(
                    state,
                    name=names.of_shard(f"adamw {update.rstrip('/')}", shard),
                    update=number,
                    gradients=names.gradients(update, shard),
                    clip=names.clip(update),
                    weights=names.shard_weights(shard),
                    options=self.settings.optimizer,
                    learning_rate=rate,
                )
            )
        return rate

    def _learning_rate(self, number: int) -> float:
        return learning_rate_at(
            number,
            total=self.run.num_updates,
            peak=self.settings.optimizer.learning_rate,
            warmup=self.settings.warmup_updates,
            schedule=self.settings.schedule,
        )

    def _add_metrics(self, update: str, epoch: int, learning_rate: float | None, *, after: str) -> None:
        line = MetricsLine(
            step=self.settings.first_step + self.step,
            epoch=epoch,
            update=update,
            learning_rate=learning_rate,
            ends_step=epoch == self.settings.epochs_per_step - 1,
        )
        self.plan.add(line.stage(after))
