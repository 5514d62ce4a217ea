"""A tiny model learns, from random weights and rewards alone, to find the marked letter in a long prompt.

    engine execute learn_tiny --run runs/exact
    engine execute learn_tiny --run runs/stop --set gradient=stop-prompt

A prompt is 512 tokens: filler, 32 letters strewn over it, and one marked letter somewhere. The answer is that letter,
without its mark. Letters are drawn anew for every prompt, so there is nothing to remember. The reward is 1 for the
right letter and 0 for anything else; nothing else tells the model what is wanted, and an entropy bonus keeps it trying.

What must be learned is partly on the prompt's side: keys by which a marked letter is found among the others, and values
that say which one it is. They get a gradient through the prompt's state only.
"""

from __future__ import annotations

import random

from transformers import AutoConfig

from engine import Plan
from engine.errors import UsageError
from stages import (
    DEFAULT_PAGE_TOKENS,
    Prompt,
    RolloutSettings,
    Sample,
    deal,
    find_policy,
    grpo_run,
    parse_dtype,
    step_settings,
)

LETTERS = 8
QUESTION = 2 * LETTERS  # letters are 0 to 7, marked letters 8 to 15
FILLER = QUESTION + 1
VOCABULARY = FILLER + 1
STREWN = 32

HIDDEN = 32


def right_letter(sample: Sample) -> float:
    """Return 1 for the marked letter, else 0."""
    return float(sample.token_ids[0] == sample.data)


def marked_letter_prompt(numbers: random.Random, prompt_tokens: int, *, name: str) -> Prompt:
    """Return a prompt with one marked letter; its ``data`` is that letter."""
    tokens = [FILLER] * (prompt_tokens - 1)
    *strewn, place = numbers.sample(range(prompt_tokens - 1), min(STREWN, prompt_tokens - 2) + 1)
    for position in strewn:
        tokens[position] = numbers.randrange(LETTERS)
    letter = numbers.randrange(LETTERS)
    tokens[place] = LETTERS + letter
    return Prompt(token_ids=(*tokens, QUESTION), data=letter, source=name)


def learn_tiny(
    steps: int = 300,
    groups_per_step: int = 8,
    group_size: int = 16,
    prompt_tokens: int = 512,
    gradient: str = "exact",
    loss: str = "grpo",
    learning_rate: float = 3e-3,
    warmup_updates: int = 10,
    epochs_per_step: int = 1,
    entropy_bonus: float = 0.2,
    dtype: str = "float32",
    temperature: float = 1.0,
    seed: int = 0,
    chunk_tokens: int | None = None,
    branches_at_once: int | None = None,
    head_rows: int | None = None,
    stored_inputs: int | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    state_tier: str = "auto",
) -> Plan:
    """A few hundred steps of a llama with two layers of hidden size 32."""
    if prompt_tokens < 3:
        raise UsageError(f"prompt_tokens={prompt_tokens}: a prompt has a marked letter, another token and the question")
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1 << 16,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=False,
    )
    numbers = random.Random(seed)
    prompts = [
        marked_letter_prompt(numbers, prompt_tokens, name=f"prompt {number}")
        for number in range(steps * groups_per_step)
    ]
    settings = step_settings(
        gradient=gradient,
        loss=loss,
        learning_rate=learning_rate,
        warmup_updates=warmup_updates,
        epochs_per_step=epochs_per_step,
        entropy_bonus=entropy_bonus,
        dtype=parse_dtype(dtype),
        temperature=temperature,
        seed=seed,
        page_tokens=page_tokens,
        state_tier=state_tier,
        chunk_tokens=chunk_tokens,
        branches_at_once=branches_at_once,
        head_rows=head_rows,
        stored_inputs=stored_inputs,
    )
    return grpo_run(
        name="learn_tiny",
        policy=find_policy(config),
        steps=deal(prompts, steps=steps, groups_per_step=groups_per_step),
        settings=settings,
        rollout=RolloutSettings(reward=right_letter, group_size=group_size, max_response_tokens=1, stop_token_ids=()),
    )
