"""All that decides the result of a GRPO run besides policy and groups, and how plans spell it.

Every plan that makes a GRPO step uses the same flat names, which ``--set`` overrides; `step_settings` turns them into
a `GrpoSettings`. How responses are sampled and rewarded is a `RolloutSettings`, which holds functions and is written
in the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from engine.budget import Tier
from engine.errors import UsageError
from engine.plan import ALL_TIERS, Choices
from engine.source import source_digest
from stages.advantages import Baseline
from stages.checks import check_count, check_seed
from stages.kept import STORED_INPUTS_LADDER
from stages.learning_rate import Schedule
from stages.losses import LossConfig
from stages.update import AdamWOptions

if TYPE_CHECKING:
    from stages.rewards import Sample

DEFAULT_PAGE_TOKENS = 512

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """All that decides the result of a run, besides policy and groups.

    ``epochs_per_step``: optimizer updates that a step makes from the same rollouts; from the second on, ratios are to
    the log-probabilities of the first. ``schedule`` and ``warmup_updates`` shape the learning rate over all updates of
    the run (`stages.learning_rate`). ``optimizer_state`` is a file to go on from, ``save_optimizer`` leaves one.
    ``first_step`` is the number of the run's first step where it goes on from another run: it counts in random numbers
    and in metrics.
    ``state_tier`` is where state, its cotangents and stored inputs live: ``auto`` leaves that to the planner.
    ``checkpoint_every`` counts steps; the last step always leaves a checkpoint.
    """

    gradient: str = "exact"
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: AdamWOptions = field(default_factory=AdamWOptions)
    first_step: int = 0
    epochs_per_step: int = 1
    schedule: Schedule = "constant"
    warmup_updates: int = 0
    optimizer_state: str | None = None
    save_optimizer: bool = False
    checkpoint_every: int | None = None
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    seed: int = 0
    baseline: Baseline = "mean"
    page_tokens: int = DEFAULT_PAGE_TOKENS
    state_tier: str = "auto"
    fixed: Choices = field(default_factory=dict)
    update_weights: bool = True

    def __post_init__(self) -> None:
        if self.gradient not in ("exact", "stop-prompt"):
            raise UsageError(f"gradient={self.gradient!r} is not known; choose exact or stop-prompt")
        if not 0 < self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature!r} must be a positive number")
        if self.state_tier not in ("auto", *ALL_TIERS):
            raise UsageError(f"state_tier={self.state_tier!r} is not known; choose auto, device, host or disk")
        check_seed(self.seed)
        check_count("first_step", self.first_step, least=0)
        counts = {"page_tokens": self.page_tokens, "epochs_per_step": self.epochs_per_step}
        if self.checkpoint_every is not None:
            counts["checkpoint_every"] = self.checkpoint_every
        for name, value in {**self.fixed, **counts}.items():
            check_count(name, value, least=0 if name == "stored_inputs" else 1)
        if (stored := self.fixed.get("stored_inputs", 0)) not in STORED_INPUTS_LADDER:
            raise UsageError(
                f"stored_inputs={stored!r} is not known; choose one of {', '.join(map(str, STORED_INPUTS_LADDER))}"
            )

    @property
    def state_tiers(self) -> tuple[Tier, ...]:
        """The tiers that state, its cotangents and stored inputs may live on."""
        return ALL_TIERS if self.state_tier == "auto" else (Tier(self.state_tier),)


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How responses are sampled and rewarded.

    Attributes:
        reward: called for every sampled response (`stages.rewards.Sample`); returns a finite number.
        group_size: responses a prompt.
        max_response_tokens: a response that has not ended by then is cut. Memory is planned for this length.
        advantage: called with the responses of a group and their rewards; returns a number a response, or a list of
            one number a token. None means (reward - mean) / (std + 1e-4), as `stages.advantages` has it.
        stop_token_ids: a response ends with the first of these; None means those of the policy and its tokenizer.
        greedy: take the likeliest token instead of a random one.
        workspace_bytes: device bytes of tensors that the functions make, at their peak; most make none.
    """

    reward: Callable[[Sample], float]
    group_size: int = 8
    max_response_tokens: int = 256
    advantage: Callable[[Sequence[Sample], Sequence[float]], Sequence[float | Sequence[float]]] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    greedy: bool = False
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("reward", "advantage"):
            given = getattr(self, name)
            if not callable(given) and (given is not None or name == "reward"):
                raise UsageError(f"{name}={given!r} is no function; give one that takes what was sampled")
        if self.stop_token_ids is not None:
            try:
                if any(isinstance(token, bool) for token in self.stop_token_ids):
                    raise TypeError("a truth value is no token id")
                stops = tuple(operator.index(token) for token in self.stop_token_ids)
            except TypeError as error:
                raise UsageError(f"stop_token_ids={self.stop_token_ids!r} must be a tuple of token ids") from error
            object.__setattr__(self, "stop_token_ids", stops)
        if not isinstance(self.greedy, bool):
            raise UsageError(f"greedy={self.greedy!r} must be True or False")
        nbytes: object = self.workspace_bytes
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise UsageError(f"workspace_bytes={nbytes!r} must be a whole number of bytes, 0 or more")
        check_count("group_size", self.group_size)
        check_count("max_response_tokens", self.max_response_tokens)

    @cached_property
    def function_digests(self) -> tuple[str, str]:
        """Hashes of the reward and the advantage function, for recipe keys."""
        return source_digest(self.reward), "" if self.advantage is None else source_digest(self.advantage)


def parse_dtype(name: str | None, default: torch.dtype = torch.float32) -> torch.dtype:
    """Return the compute dtype of that name. Raises UsageError for a name that is not one of the three."""
    if name is None:
        return default if default in _DTYPES.values() else torch.float32
    if name not in _DTYPES:
        raise UsageError(f"dtype={name!r} is not known; choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


_LOSS_NAMES = (
    "loss", "aggregation", "epsilon", "epsilon_high", "delta", "kl", "beta", "entropy_bonus", "max_response_tokens",
)  # fmt: skip
_OPTIMIZER_NAMES = ("learning_rate", "weight_decay", "max_grad_norm")
_RUN_NAMES = (
    "first_step", "epochs_per_step", "schedule", "warmup_updates",
    "optimizer_state", "save_optimizer", "checkpoint_every",
)  # fmt: skip
_CHOICE_NAMES = ("chunk_tokens", "branches_at_once", "head_rows", "stored_inputs", "layer_spans")
_OWN_NAMES = ("gradient", "temperature", "seed", "baseline", "page_tokens", "state_tier")


def step_settings(*, dtype: torch.dtype, **flat: Any) -> GrpoSettings:
    """Return the settings that plans spell as flat keyword arguments; a choice of None is left to the planner.

    Known names: those of `stages.losses.LossConfig`, learning_rate, weight_decay, max_grad_norm, those of
    `GrpoSettings` that are plain numbers or names, and the choices chunk_tokens, branches_at_once, head_rows,
    stored_inputs and layer_spans.

    Raises:
        UsageError: an unknown name, or a value out of its range.
    """
    known = (*_LOSS_NAMES, *_OPTIMIZER_NAMES, *_RUN_NAMES, *_CHOICE_NAMES, *_OWN_NAMES)
    unknown = [name for name in flat if name not in known]
    if unknown:
        raise UsageError(f"no setting {unknown[0]!r}; known are {', '.join(known)}")

    def given(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: flat[name] for name in names if name in flat}

    return GrpoSettings(
        loss=LossConfig(**given(_LOSS_NAMES)),
        optimizer=AdamWOptions(**given(_OPTIMIZER_NAMES)),
        fixed={name: value for name, value in given(_CHOICE_NAMES).items() if value is not None},
        dtype=dtype,
        **given(_OWN_NAMES),
        **given(_RUN_NAMES),
    )
