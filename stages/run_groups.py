"""What a run is to do: the groups of its steps, as token trees, with what is known of them before it begins.

A group is given, or a `Prompt` whose responses are sampled, which is planned at its largest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.errors import UsageError
from engine.recipe import digest as hashed
from models.policy import PolicySource
from stages import names
from stages.advantages import GroupAdvantages, group_advantages
from stages.groups import Group, Prompt, StepGroup, group_data, prompt_ids
from stages.losses import LossConfig
from stages.rewards import SampledGroup
from stages.settings import GrpoSettings, RolloutSettings
from stages.tree import Node, group_tree, sampled_tree

_LEAST_PERIODS = 3
# Of a prompt in an outline: its first and its last chunks see fewer pages, and those between see as many as need be.


@dataclass(frozen=True, kw_only=True)
class RunGroups:
    """The groups of every step; ``rollout`` says how responses are made where a group is a `Prompt`."""

    policy: PolicySource
    steps: tuple[tuple[StepGroup, ...], ...]
    settings: GrpoSettings
    rollout: RolloutSettings | None
    tokenizer: Any

    @cached_property
    def step_digests(self) -> list[str]:
        """A hash of every step's groups, made once for all lowerings and epochs: a prompt may have millions of ids."""
        return [hashed([group_data(group) for group in groups]) for groups in self.steps]

    @cached_property
    def digest(self) -> str:
        """A hash of the groups of all steps."""
        return hashed(self.step_digests)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a sampled response."""
        if self.rollout is not None and self.rollout.stop_token_ids is not None:
            return self.rollout.stop_token_ids
        return self.policy.stop_token_ids(self.tokenizer)

    @cached_property
    def _token_text_bytes(self) -> int:
        """The bytes of the longest token's text, as its vocabulary spells it (no shorter than the text itself)."""
        vocabulary = self.tokenizer.get_vocab() if self.tokenizer is not None and self.samples else {}
        return max((len(token.encode()) for token in vocabulary), default=0)

    @cached_property
    def loss(self) -> LossConfig:
        """The loss; its norm by the longest response is, where responses are sampled, by the longest allowed."""
        config, rollout = self.settings.loss, self.rollout
        if not self.samples or rollout is None or config.max_response_tokens is not None:
            return config
        return replace(config, max_response_tokens=rollout.max_response_tokens)

    @cached_property
    def advantages(self) -> list[list[GroupAdvantages | None]]:
        """The advantages of every step's groups; None where responses are still to be sampled."""
        settings = self.settings
        return [
            [
                group_advantages(group, scale=settings.loss.scale_advantages, baseline=settings.baseline)
                if isinstance(group, Group)
                else None
                for group in groups
            ]
            for groups in self.steps
        ]

    @property
    def samples(self) -> bool:
        """Whether any response is sampled."""
        return any(isinstance(group, Prompt) for groups in self.steps for group in groups)

    def sampled_groups(self, step: int) -> list[SampledGroup]:
        """Return the groups of a step whose responses are sampled, in order."""
        return [
            self._sampled_group(step, index, group)
            for index, group in enumerate(self.steps[step])
            if isinstance(group, Prompt)
        ]

    def _sampled_group(self, step: int, index: int, prompt: Prompt) -> SampledGroup:
        if self.rollout is None:
            raise UsageError(f"{prompt.source} has no responses, and the plan has no reward function to sample with")
        return SampledGroup(
            prompt=prompt,
            step=step,
            group=index,
            rollout=self.rollout,
            stop_token_ids=self.stop_token_ids,
            tokenizer=self.tokenizer,
            token_text_bytes=self._token_text_bytes,
            scale_advantages=self.settings.loss.scale_advantages,
            baseline=self.settings.baseline,
            first_step=self.settings.first_step,
        )

    def trees(self, step: int, update: str) -> list[tuple[int, Node]]:
        """Return a step's token trees with their groups' numbers, longest prompt first.

        Groups without anything to train on have none. ``update`` begins the nodes' names.
        """
        return sorted(self._trees(step, update), key=lambda item: -item[1].max_inputs)

    def _trees(self, step: int, update: str) -> Iterator[tuple[int, Node]]:
        first = 0
        for index, group in enumerate(self.steps[step]):
            name = f"{update}group{index}"
            if isinstance(group, Group):
                tree = group_tree(group, name=name, first_response=first)
                first += len(group.responses)
            else:
                tree = self._sampled_tree(step, index, group, name, first)
                first += len(tree.children)
            if tree.children:
                yield index, tree

    def _sampled_tree(self, step: int, index: int, prompt: Prompt, name: str, first: int) -> Node:
        rollout = self._sampled_group(step, index, prompt).rollout
        return sampled_tree(
            prompt,
            name=name,
            rollout=names.rollout(step, index),
            group_size=rollout.group_size,
            max_tokens=rollout.max_response_tokens,
            first_response=first,
        )

    @cached_property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """(longest prompt, longest response, most branches, most rows) of every step."""
        return [self._shape([tree for _, tree in self.trees(step, "")]) for step in range(len(self.steps))]

    def _shape(self, trees: list[Node]) -> tuple[int, int, int, int]:
        leaves = [leaf for tree in trees for leaf in tree.children]
        return (
            max((tree.max_inputs for tree in trees), default=0),
            max((leaf.max_inputs for leaf in leaves), default=1),
            max((len(tree.children) for tree in trees), default=1),
            max((sum(leaf.max_rows(0, leaf.max_inputs) for leaf in tree.children) for tree in trees), default=1),
        )

    def longest_sequence_tokens(self) -> int:
        """Return how many positions are evaluated at most: the longest prompt with the longest response of a step."""
        return max(prompt + response for prompt, response, _, _ in self.shapes)

    @cached_property
    def node_tokens(self) -> list[list[int]]:
        """How many tokens every node of each step's trees has, at most."""
        trees = ([tree for _, tree in self.trees(step, "")] for step in range(len(self.steps)))
        return [[node.max_inputs for tree in found for node in (tree, *tree.children)] for found in trees]

    @cached_property
    def unlike_steps(self) -> list[int]:
        """The first of every kind of steps that need the same bytes, and the last step, which has a checkpoint.

        Steps whose groups are all sampled are alike where their prompts have the same lengths.
        """
        first: dict[Hashable, int] = {}
        for step, groups in enumerate(self.steps):
            lengths = tuple(len(group.token_ids) for group in groups if isinstance(group, Prompt))
            first.setdefault(lengths if len(lengths) == len(groups) else step, step)
        return sorted({*first.values(), len(self.steps) - 1})

    def with_short_prompts(self, period: int) -> tuple[tuple[StepGroup, ...], ...]:
        """Return each kind of step once, with prompts that are some multiple of ``period`` tokens shorter."""
        return tuple(tuple(_shortened(group, period) for group in self.steps[step]) for step in self.unlike_steps)


def _shortened(group: StepGroup, period: int) -> StepGroup:
    """Return a group with a prompt that is some multiple of ``period`` tokens shorter."""
    ids = prompt_ids(group)
    cut = max(0, (len(ids) - 1) // period - _LEAST_PERIODS) * period
    kept = ids[cut:]
    return replace(group, prompt_ids=kept) if isinstance(group, Group) else replace(group, token_ids=kept)
