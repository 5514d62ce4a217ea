"""The GRPO vocabulary: token trees and their lowering to stages, losses, optimizer, inputs and outputs, audit.

May import ``models`` and ``engine``; is imported by ``plans``.
"""

from models.policy import find_policy
from stages.group_parser import parse_group
from stages.groups import Group, Prompt, Response
from stages.losses import LossConfig
from stages.rewards import Sample
from stages.rollouts import read_rollouts
from stages.settings import DEFAULT_PAGE_TOKENS, GrpoSettings, RolloutSettings, parse_dtype, step_settings
from stages.space import GrpoSpace
from stages.step import deal, grpo_run, grpo_step
from stages.update import AdamWOptions

__all__ = [
    "DEFAULT_PAGE_TOKENS",
    "AdamWOptions",
    "Group",
    "GrpoSettings",
    "GrpoSpace",
    "LossConfig",
    "Prompt",
    "Response",
    "RolloutSettings",
    "Sample",
    "deal",
    "find_policy",
    "grpo_run",
    "grpo_step",
    "parse_dtype",
    "parse_group",
    "read_rollouts",
    "step_settings",
]
