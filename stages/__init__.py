"""The GRPO vocabulary: token trees and their lowering to stages, losses, optimizer, inputs and outputs, audit.

May import ``models`` and ``engine``; is imported by ``plans``.
"""

from models.policy import find_policy
from stages.losses import LossConfig
from stages.rollouts import Group, Response, parse_group, read_rollouts
from stages.step import GrpoSettings, GrpoSpace, grpo_step, parse_dtype
from stages.update import AdamWOptions

__all__ = [
    "AdamWOptions",
    "Group",
    "GrpoSettings",
    "GrpoSpace",
    "LossConfig",
    "Response",
    "find_policy",
    "grpo_step",
    "parse_dtype",
    "parse_group",
    "read_rollouts",
]
