"""Rewards and advantages of sampled responses, from functions that the plan brings.

Two stages a group. ``reward`` calls the plan's reward function for every response; ``advantages`` turns rewards into
one number a token, by the plan's function or by the usual rule (`stages.advantages`). Both run on plain Python data,
once, and what they wrote is what every later epoch uses. The functions' sources go into the recipe keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.context import StageContext
from engine.errors import StageFailedError
from engine.origin import at, function_origin
from engine.plan import Stage, TensorSpec, Value
from engine.recipe import digest
from stages import names
from stages.advantages import Baseline, group_advantages
from stages.groups import Group, Prompt, Response
from stages.sampled import VECTOR_TIERS, read_responses
from stages.settings import RolloutSettings

Recorded = Callable[[StageContext, int], Mapping[str, Any] | None]
"""Returns what is on record of a group, given its number in the step; None if nothing is."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sampled response, as reward and advantage functions see it.

    Attributes:
        text: the response as text, without special tokens; empty where the policy has no tokenizer.
        token_ids: [tokens] ids, with the stop token if it ended with one.
        finished: whether it ended with a stop token (and was not cut).
        prompt_ids: [tokens] ids of the prompt.
        data: what the plan gave along with the prompt.
        step, group, response: which one it is.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: bool
    prompt_ids: tuple[int, ...]
    data: Any
    step: int
    group: int
    response: int

    @property
    def place(self) -> str:
        """Which response it is, for messages."""
        return f"step {self.step}, group {self.group}, response {self.response}"


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """A prompt of a step with how its responses are made; knows the stages and Values that hang on them.

    ``token_text_bytes`` is the most that a token's text takes, 0 without a tokenizer.
    """

    prompt: Prompt
    step: int
    group: int
    rollout: RolloutSettings
    stop_token_ids: tuple[int, ...]
    tokenizer: Any
    token_text_bytes: int
    scale_advantages: bool
    baseline: Baseline
    first_step: int = 0

    @property
    def name(self) -> str:
        return f"{names.step_prefix(self.step)}group{self.group}"

    @property
    def rollout_name(self) -> str:
        """The Value of its sampled responses."""
        return names.rollout(self.step, self.group)

    @property
    def rewards_name(self) -> str:
        """The Value of their rewards."""
        return names.rewards(self.step, self.group)

    @property
    def advantages_name(self) -> str:
        """The Value of their advantages."""
        return names.advantages(self.step, self.group)

    @property
    def max_tokens(self) -> int:
        """The most tokens that all responses can have together."""
        return self.rollout.group_size * self.rollout.max_response_tokens

    def values(self) -> tuple[Value, Value]:
        """Return the Values of rewards and advantages."""
        size, tokens = self.rollout.group_size, self.rollout.max_response_tokens
        rewards = TensorSpec(shape=(size,), dtype="float64")
        advantages = TensorSpec(shape=(size, tokens), dtype="float64")
        return (
            Value(name=self.rewards_name, tensors={"values": rewards}, tiers=VECTOR_TIERS),
            Value(name=self.advantages_name, tensors={"values": advantages}, tiers=VECTOR_TIERS),
        )

    def stages(self, recorded: Recorded) -> tuple[Stage, Stage]:
        """Return the reward stage and the advantages stage; ``recorded`` says what is known of the group already."""
        rollout, data = self.rollout_name, digest(self.prompt.data)
        rewards, advantages = self.values()
        reward_function, advantage_function = self.rollout.function_digests
        return (
            Stage(
                name=f"reward {self.name}",
                kind="reward",
                run=lambda context: self.give_rewards(context, recorded(context, self.group) or {}),
                config={"function": reward_function, "data": data},
                reads=(rollout,),
                writes=(rewards.name,),
                workspace_bytes=rewards.nbytes + self.rollout.workspace_bytes,
                declared_bytes=self.rollout.workspace_bytes,
                origin=function_origin(self.rollout.reward),
            ),
            Stage(
                name=f"advantages {self.name}",
                kind="advantages",
                run=lambda context: self.give_advantages(context, recorded(context, self.group) or {}),
                config={
                    "function": advantage_function,
                    "scale": self.scale_advantages,
                    "baseline": self.baseline,
                    "data": data,
                },
                reads=(rollout, rewards.name),
                writes=(advantages.name,),
                workspace_bytes=advantages.nbytes + self.rollout.workspace_bytes,
                declared_bytes=self.rollout.workspace_bytes,
                origin=function_origin(self.rollout.advantage),
            ),
        )

    def samples(self, context: StageContext) -> list[Sample]:
        """Return the group's responses."""
        return [
            Sample(
                text=self.text(ids, skip_special_tokens=True),
                token_ids=tuple(ids),
                finished=self.finished(ids),
                prompt_ids=self.prompt.token_ids,
                data=self.prompt.data,
                step=self.first_step + self.step,
                group=self.group,
                response=index,
            )
            for index, ids in enumerate(read_responses(context, self.rollout_name))
        ]

    def finished(self, ids: Sequence[int]) -> bool:
        """Return whether a response ended with a stop token."""
        return bool(ids) and ids[-1] in self.stop_token_ids

    def text(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return ids as text; the empty text where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def rewards(self, context: StageContext) -> list[float]:
        """Return the rewards that `give_rewards` wrote."""
        found: list[float] = context.tensors(self.rewards_name)["values"].tolist()
        return found

    def advantages(self, context: StageContext) -> list[list[float]]:
        """Return the advantages that `give_advantages` wrote, one a token of every response."""
        responses = read_responses(context, self.rollout_name)
        rows = context.tensors(self.advantages_name)["values"].tolist()
        return [row[: len(ids)] for row, ids in zip(rows, responses, strict=True)]

    def give_rewards(self, context: StageContext, recorded: Mapping[str, Any]) -> None:
        """Call the reward function for every response, unless its rewards are ``recorded``.

        Raises:
            StageFailedError: a reward is not a finite number.
        """
        found = recorded.get("rewards")
        if found is None:
            where = at(function_origin(self.rollout.reward))
            found = [_number(self.rollout.reward(sample), "reward", sample, where) for sample in self.samples(context)]
        _fill(context.tensors(self.rewards_name)["values"], found)

    def give_advantages(self, context: StageContext, recorded: Mapping[str, Any]) -> None:
        """Write one advantage a token: as ``recorded``, by the plan's function, or by the usual rule.

        Raises:
            StageFailedError: the function returned something else than a finite number a response or a token.
        """
        responses, rewards = read_responses(context, self.rollout_name), self.rewards(context)
        given: Sequence[float | Sequence[float]]
        if "advantages" in recorded:
            given = recorded["advantages"]
        elif self.rollout.advantage is None:
            given = self._usual(responses, rewards)
        else:
            given = self._given(self.samples(context), rewards)
        rows = [
            list(value) if isinstance(value, list | tuple) else [value] * len(ids)
            for ids, value in zip(responses, given, strict=True)
        ]
        most = self.rollout.max_response_tokens
        padded = [row + [0.0] * (most - len(row)) for row in rows]
        _fill(context.tensors(self.advantages_name)["values"], padded)

    def _usual(
        self, responses: Sequence[Sequence[int]], rewards: Sequence[float]
    ) -> Sequence[float | tuple[float, ...]]:
        group = Group(
            prompt_ids=self.prompt.token_ids,
            responses=tuple(
                Response(token_ids=tuple(ids), mask=(True,) * len(ids), reward=reward)
                for ids, reward in zip(responses, rewards, strict=True)
            ),
            source=f"step {self.step}, group {self.group}",
        )
        return group_advantages(group, scale=self.scale_advantages, baseline=self.baseline).values

    def _given(self, samples: Sequence[Sample], rewards: Sequence[float]) -> Sequence[float | list[float]]:
        assert self.rollout.advantage is not None
        where = at(function_origin(self.rollout.advantage))
        returned: Any = self.rollout.advantage(samples, rewards)
        if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
            raise StageFailedError(
                f"the advantage function returned {returned!r} for step {self.step}, group {self.group}; return a list "
                f"with an entry for every response{where}"
            )
        found = list(returned)
        if len(found) != len(samples):
            raise StageFailedError(
                f"the advantage function returned {len(found)} entries for {len(samples)} responses of step "
                f"{self.step}, group {self.group}; return one a response{where}"
            )
        return [_one_or_many(value, sample, where) for value, sample in zip(found, samples, strict=True)]


def rollout_metrics(context: StageContext, groups: Sequence[SampledGroup]) -> dict[str, float]:
    """Return what metrics say of a step's sampled responses."""
    responses = [(group, ids) for group in groups for ids in read_responses(context, group.rollout_name)]
    rewards = [reward for group in groups for reward in group.rewards(context)]
    scale = max(map(abs, rewards)) or 1.0  # squares of large rewards would not be numbers
    mean = scale * (math.fsum(reward / scale for reward in rewards) / len(rewards))
    squares = math.fsum(((reward - mean) / scale) ** 2 for reward in rewards)
    lengths = [len(ids) for _, ids in responses]
    silent = sum(not any(any(row) for row in group.advantages(context)) for group in groups)
    return {
        "reward_mean": mean,
        "reward_std": scale * math.sqrt(squares / len(rewards)),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": float(max(lengths)),
        "finished_fraction": sum(group.finished(ids) for group, ids in responses) / len(responses),
        "groups_without_signal": float(silent),
    }


def _fill(out: torch.Tensor, numbers: Sequence[Any]) -> None:
    out.copy_(torch.tensor(numbers, dtype=out.dtype, device=out.device))


def _one_or_many(value: Any, sample: Sample, where: str) -> float | list[float]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        return _number(value, "advantage", sample, where)
    if len(value) != len(sample.token_ids):
        raise StageFailedError(
            f"{sample.place}: the advantage function returned {len(value)} numbers for {len(sample.token_ids)} tokens"
            f"{where}"
        )
    return [_number(item, "advantage", sample, where) for item in value]


def _number(value: Any, what: str, sample: Sample, where: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise StageFailedError(f"{sample.place}: the {what} function returned {value!r}; return a finite number{where}")
    return number
