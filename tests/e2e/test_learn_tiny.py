"""The learning plan is what it says: its task can be checked, its run is reproducible, and it learns.

That it learns is shown by the whole run, whose curve is in the documentation (`make pictures`); here its beginning is
held against a second run of the same, bit for bit; the slow test runs all of it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.hardware import load_profile
from engine.planner import forecast
from engine.runtime import execute
from plans.learn_tiny import LETTERS, QUESTION, learn_tiny, marked_letter_prompt, right_letter
from stages import Sample
from tests.helpers import budget, one_thread


def rewards_of(results: Path) -> list[float]:
    return [json.loads(line)["reward_mean"] for line in (results / "metrics.jsonl").read_text().splitlines()]


def test_a_prompt_has_one_marked_letter_which_is_the_answer() -> None:
    numbers = random.Random(0)
    for tokens in (3, 20, 512):
        for _ in range(50):
            prompt = marked_letter_prompt(numbers, tokens, name="p")
            assert len(prompt.token_ids) == tokens
            assert prompt.token_ids[-1] == QUESTION
            (marked,) = (token for token in prompt.token_ids if LETTERS <= token < QUESTION)
            assert marked - LETTERS == prompt.data


def test_the_reward_is_one_for_the_marked_letter_only() -> None:
    def sample(token: int) -> Sample:
        return Sample(text="", token_ids=(token,), finished=False, prompt_ids=(1,), data=5, step=0, group=0, response=0)

    assert [token for token in range(QUESTION + 2) if right_letter(sample(token))] == [5]


def test_the_same_seed_gives_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    with one_thread():
        for name in ("first", "second"):
            plan = learn_tiny(steps=3, groups_per_step=2, group_size=4, prompt_tokens=64)
            execute(forecast(plan, budget(), load_profile("cpu")), tmp_path / name)
    first, second = ((tmp_path / name / "results") for name in ("first", "second"))
    for file in ("metrics.jsonl", "checkpoint/model.safetensors", "rollouts/step00002.jsonl"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_marked_letter_is_found_after_300_steps(tmp_path: Path) -> None:
    assert main(["execute", "learn_tiny", "--run", str(tmp_path / "run")]) == 0
    rewards = rewards_of(tmp_path / "run" / "results")
    assert sum(rewards[:20]) / 20 < 0.2
    assert sum(rewards[-50:]) / 50 > 0.8
