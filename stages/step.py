"""A whole GRPO step in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from engine.plan import Plan
from models.policy import PolicySource, find_policy
from stages.audit import audit
from stages.groups import Group, require_trainable
from stages.settings import GrpoSettings
from stages.space import GrpoSpace


def grpo_step(
    *, name: str, policy: PolicySource | str, groups: Sequence[Group], settings: GrpoSettings, tokenizer: Any = None
) -> Plan:
    """Return the plan of one exact GRPO step over all ``groups``.

    The plan comes lowered at its fastest choices; its ``space`` holds the others. No weights are loaded.

    Raises:
        UsageError: nothing to train on, or settings that contradict each other.
        UnsupportedModelError: the policy's architecture is refused.
    """
    require_trainable(groups)
    source = find_policy(policy) if isinstance(policy, str) else policy
    space = GrpoSpace(name=name, policy=source, groups=tuple(groups), settings=settings, tokenizer=tokenizer)
    plan = space.lower(space.first())
    plan.hooks["audit"] = partial(audit, space)
    return plan
