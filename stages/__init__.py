"""The vocabulary of GRPO: how a training step becomes stages.

Lives here: lowering a token tree to stages (prefill, score, loss, replay, reverse sweep, merge, optimizer step), the
losses and advantages, the optimizer, rollouts, and the inputs and outputs of a step.

May import ``engine`` and ``models``. Never ``plans``.
"""
