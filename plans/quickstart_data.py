"""One GRPO group for the quickstart: a question on Python's own documentation, with four answers of known quality.

The prompt is real text that every Python brings along (``pydoc_data.topics``, topics in the order of their names), and
has exactly the wanted number of tokens on every version of Python, although the text differs between versions. The
question is on the first topic, ``assert``, so the answer lies at the far end of the context.

Pieces are put together as token ids: what the chat template puts before and after the document, and the document cut
to what is left. Text is never tokenised again after the cut, so no merge across an edge can change the count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from engine.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "Answer the question at the end from this part of the Python documentation.\n\n"
QUESTION = (
    '\n\nQuestion: What is "assert expression" equivalent to, and what happens to assert statements when Python is run '
    "with the -O option?"
)
# Stands for the document while the chat template is rendered.
PLACEHOLDER = "[[the document]]"

# Each with its reward: right and whole, right but without the equivalence, half wrong, wrong.
ANSWERS = (
    (
        'It is equivalent to "if __debug__: if not expression: raise AssertionError". With -O, __debug__ is False and '
        "the code generator emits no code for assert statements, so they are not checked at all.",
        1.0,
    ),
    (
        "It raises an AssertionError when the expression is false. When Python is run with the -O option, __debug__ is "
        "False and assert statements are left out of the compiled code, so nothing is checked.",
        0.7,
    ),
    (
        "It checks that the expression is true and raises an AssertionError if it is not. The -O option makes Python "
        "run faster, but assert statements are still executed and still raise the same error as before.",
        0.2,
    ),
    (
        "It is equivalent to an assignment: the value of the expression is bound to the target list from left to "
        "right. With the -O option, Python opens the interactive debugger before the first statement of the program.",
        0.0,
    ),
)


def quickstart_group(tokenizer: PreTrainedTokenizerBase, num_tokens: int = 2048) -> dict[str, Any]:
    """Return one group in the format of rollouts: prompt ids, the ids of four responses, and their rewards.

    The responses end with the tokenizer's end-of-sequence token where it has one, as sampled ones would.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return {
        "prompt": documentation_prompt(tokenizer, num_tokens),
        "responses": [_ids_of(tokenizer, text) + end for text, _ in ANSWERS],
        "rewards": [reward for _, reward in ANSWERS],
    }


def documentation_prompt(tokenizer: PreTrainedTokenizerBase, num_tokens: int = 2048) -> list[int]:
    """Return a chat prompt of exactly ``num_tokens`` ids: instruction, documentation, question, generation prompt.

    Raises:
        UsageError: the tokenizer has no chat template, or the template and the question leave no room for a document.
    """
    before, after = _template_around_document(tokenizer)
    num_document_tokens = num_tokens - len(before) - len(after)
    if num_document_tokens <= 0:
        raise UsageError(
            f"a prompt of {num_tokens} tokens has no room for a document: the chat template and the question alone are "
            f"{len(before) + len(after)}; set prompt_tokens to a larger number"
        )
    return before + _document(tokenizer, num_document_tokens) + after


def _template_around_document(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that come before and after the document."""
    if tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a chat model, or a plan of your own"
        )
    # No system message: some templates refuse it, and those that want one put in their own.
    messages = [{"role": "user", "content": INSTRUCTION + PLACEHOLDER + QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, placeholder, after = str(text).partition(PLACEHOLDER)
    if not placeholder:
        raise UsageError(f"the chat template of {tokenizer.name_or_path!r} changes the text of a message")
    return _ids_of(tokenizer, before), _ids_of(tokenizer, after)


def _document(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[int]:
    """Return the first ``num_tokens`` ids of the documentation, whose last character is a whole one."""
    ids = list(itertools.islice(_documentation_ids(tokenizer), num_tokens))
    # A token may be a part of a character: line breaks take the place of what the cut left of one.
    num_kept = num_tokens
    while num_kept and str(tokenizer.decode(ids[:num_kept])).endswith("\ufffd"):
        num_kept -= 1
    if num_kept == num_tokens:
        return ids
    return ids[:num_kept] + _ids_of(tokenizer, "\n")[-1:] * (num_tokens - num_kept)


def _documentation_ids(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield the ids of all topics, again from the first one when all are read."""
    for name in itertools.cycle(sorted(topics)):
        yield from _ids_of(tokenizer, topics[name].rstrip() + "\n\n\n")


def _ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
