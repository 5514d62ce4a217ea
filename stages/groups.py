"""One GRPO group: a prompt with its responses and what is known about them.

Groups are plain data: `stages.group_parser` makes them from records, `stages.rollouts` from files, plans from either.
An empty or fully masked response stays in its group: it counts in the baseline and in the step's number of responses.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from engine.errors import UsageError
from engine.recipe import digest


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response of a group.

    Attributes:
        token_ids: [tokens] ids, possibly none.
        mask: [tokens] True where the token carries loss (sampled by the policy), False where it is only seen.
        reward: the response's reward, or None where advantages were given instead.
        advantage: given advantage: one number, or [tokens] numbers; None where rewards are to be used.
        old_logprobs: [tokens] log-probs (nats) of the policy that sampled, or None: then the ratio is exactly 1.
        ref_logprobs: [tokens] log-probs (nats) of a reference policy, or None.
    """

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]
    reward: float | None = None
    advantage: float | tuple[float, ...] | None = None
    old_logprobs: tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """One prompt with its responses; ``source`` says where it came from, for messages."""

    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    source: str

    @cached_property
    def trunk_ids(self) -> tuple[int, ...]:
        """The prompt but for its last token, which opens every response; one copy for all plans that are tried."""
        return self.prompt_ids[:-1]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt whose responses are sampled while the plan runs.

    Attributes:
        token_ids: [tokens] ids, at least one.
        data: what the reward function gets to know of it (the right answer, say); plain data.
        source: where it came from, for messages.
    """

    token_ids: tuple[int, ...]
    data: Any = None
    source: str = "prompt"

    @cached_property
    def trunk_ids(self) -> tuple[int, ...]:
        """As a group's."""
        return self.token_ids[:-1]

    def __post_init__(self) -> None:
        try:
            ids: object = self.token_ids
            if isinstance(ids, str | bytes | dict):
                raise TypeError(type(ids).__name__)
            given = tuple(self.token_ids)
            wrong = [token for token in given if isinstance(token, bool)]
            object.__setattr__(self, "token_ids", tuple(operator.index(token) for token in given))
        except TypeError as error:
            raise UsageError(
                f"{self.source}: its token ids are not whole numbers ({error}); give a tuple of ids"
            ) from error
        if wrong:
            raise UsageError(f"{self.source}: {wrong[0]!r} is no token id; give a tuple of whole numbers")
        try:
            digest(self.data)
        except TypeError as error:
            raise UsageError(
                f"{self.source}: its data is not plain ({error}); give numbers, text, lists and dicts with text keys"
            ) from error


StepGroup = Group | Prompt
"""A group of a step: with given responses, or with responses that are still to be sampled."""


def prompt_ids(group: StepGroup) -> tuple[int, ...]:
    """Return the ids of a group's prompt."""
    return group.token_ids if isinstance(group, Prompt) else group.prompt_ids


def require_trainable(groups: Sequence[Group]) -> None:
    """Refuse a batch in which no response has a token that carries loss.

    Raises:
        UsageError: there is no trainable token in any group.
    """
    if any(any(response.mask) for group in groups for response in group.responses):
        return
    num_responses = sum(len(group.responses) for group in groups)
    num_tokens = sum(len(response.token_ids) for group in groups for response in group.responses)
    first = f", the first being {groups[0].source}" if groups else ""
    raise UsageError(
        f"nothing to train on: {len(groups)} groups with {num_responses} responses of {num_tokens} tokens in all"
        f"{first}, and none of the tokens carries loss; give a response that is not empty and not fully masked"
    )


def group_record(group: Group) -> dict[str, Any]:
    """Return the JSON object that :func:`parse_group` turns back into ``group``, with every number kept exactly."""
    record: dict[str, Any] = {
        "prompt": list(group.prompt_ids),
        "responses": [list(response.token_ids) for response in group.responses],
        "response_masks": [[int(bit) for bit in response.mask] for response in group.responses],
    }
    columns: dict[str, list[Any]] = {
        "rewards": [response.reward for response in group.responses],
        "advantages": [response.advantage for response in group.responses],
        "old_logprobs": [response.old_logprobs for response in group.responses],
        "ref_logprobs": [response.ref_logprobs for response in group.responses],
    }
    for key, column in columns.items():
        if any(entry is not None for entry in column):
            record[key] = [list(entry) if isinstance(entry, tuple) else entry for entry in column]
    return record


def group_data(group: StepGroup) -> list[object]:
    """Return all that a group decides, as plain data to be hashed."""
    if isinstance(group, Group):
        return [list(group.prompt_ids), [list(asdict(response).values()) for response in group.responses]]
    return [list(group.token_ids), digest(group.data)]
