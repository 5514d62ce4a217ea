"""A tree deeper than a group goes through the same recursion and has the same exact gradient.

The tree here: a prompt, a first turn with scored tokens, and two second turns that continue it. The oracle evaluates
the three responses as whole sequences through Hugging Face's own model, with the derivatives that GRPO has at ratio 1
written out by hand.
"""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path

import pytest
import torch

from models.float64 import lifted_casts
from models.policy import find_policy
from stages import Group, GrpoSettings
from stages.audit import max_rel_err
from stages.run_groups import RunGroups
from stages.space import GrpoSpace
from stages.tree import Node, Tokens
from tests.helpers import make_group, random_ids, run_step, save_policy, tiny_config
from tests.parity import dense_oracle

ADVANTAGES = (0.7, -1.1, 0.4)


def turns(prompt_tokens: int) -> tuple[list[int], list[list[int]]]:
    numbers = random.Random(prompt_tokens)
    return random_ids(numbers, prompt_tokens), [random_ids(numbers, count) for count in (9, 13, 5)]


def flat_group(prompt: list[int], parts: list[list[int]]) -> Group:
    """The three turns as responses of one group: what the loss sees."""
    return make_group({"prompt": prompt, "responses": parts, "advantages": list(ADVANTAGES)})


def turn(name: str, opening: int, tokens: list[int], first_position: int, response: int, *children: Node) -> Node:
    """A node whose every token is scored; the token before it opens it."""
    rows = tuple(range(len(tokens)))
    content = Tokens(inputs=(opening, *tokens[:-1]), rows=rows, targets=tuple(tokens))
    return Node(name=name, content=content, first_position=first_position, response=response, children=children)


class DeepGroups(RunGroups):
    """A step whose only tree is the one here: the prompt, a turn, and two that continue it."""

    def trees(self, step: int, update: str) -> list[tuple[int, Node]]:
        (group,) = self.steps[step]
        assert isinstance(group, Group)
        prompt = group.prompt_ids
        first, second, third = (list(response.token_ids) for response in group.responses)
        after = len(prompt) - 1 + len(first)
        leaves = (
            turn("tree/first/second", first[-1], second, after, 1),
            turn("tree/first/third", first[-1], third, after, 2),
        )
        inner = turn("tree/first", prompt[-1], first, len(prompt) - 1, 0, *leaves)
        trunk = Node(name="tree/prompt", content=Tokens(inputs=prompt[:-1]), first_position=0, children=(inner,))
        return [(0, trunk)]


class DeepSpace(GrpoSpace):
    """The plans of that step."""

    @cached_property
    def groups(self) -> RunGroups:
        return DeepGroups(
            policy=self.policy, steps=self.steps, settings=self.settings, rollout=None, tokenizer=self.tokenizer
        )


def deep_space(policy: Path, settings: GrpoSettings, prompt: list[int], parts: list[list[int]]) -> GrpoSpace:
    steps = ((flat_group(prompt, parts),),)
    return DeepSpace(name="test", policy=find_policy(policy), steps=steps, settings=settings)


def oracle(policy: Path, prompt: list[int], parts: list[list[int]], *, stop_prompt: bool) -> dict[str, torch.Tensor]:
    hf = dense_oracle.load(policy, "sdpa")
    first, second, third = parts
    losses = []
    for before, tokens, advantage in zip(([], first, first), (first, second, third), ADVANTAGES, strict=True):
        response = flat_group(prompt, [before + tokens] * 3).responses[0]
        group = flat_group(prompt, [before + tokens] * 3)
        scored = dense_oracle.score(hf, group, response, 1.0, stop_prompt=stop_prompt)
        with lifted_casts(torch.float64):
            losses.append(-advantage * scored.logprobs[len(before) :].mean() / len(ADVANTAGES))
    torch.stack(losses).sum().backward()
    return {name: parameter.grad for name, parameter in hf.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
@pytest.mark.parametrize("gradient", ["exact", "stop-prompt"])
@pytest.mark.parametrize("chunk_tokens", [4, 64])
@pytest.mark.parametrize("prompt_tokens", [1, 23])
def test_the_gradient_of_a_tree_of_depth_two_equals_dense_autograd(
    gradient: str, chunk_tokens: int, prompt_tokens: int, family: str, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config(family))
    prompt, parts = turns(prompt_tokens)
    settings = GrpoSettings(
        gradient=gradient,
        dtype=torch.float64,
        page_tokens=8,
        fixed={"chunk_tokens": chunk_tokens, "branches_at_once": 2, "head_rows": 7},
        update_weights=False,
    )
    done = run_step(deep_space(policy, settings, prompt, parts), tmp_path / "run")
    expected = oracle(policy, prompt, parts, stop_prompt=gradient == "stop-prompt")
    assert max_rel_err(done.gradients, expected) <= 1e-10
