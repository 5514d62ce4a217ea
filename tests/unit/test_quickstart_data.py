"""The quickstart's group: real text, exactly as long as asked for, a question that the text answers."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from engine.errors import UsageError
from plans import quickstart_data
from plans.quickstart_data import documentation_prompt, quickstart_group

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: list[str], chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=800,
        show_progress=False,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=chat_template)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer([topics["assert"], topics["assignment"]])


@pytest.mark.parametrize("num_tokens", [2048, 256, 257, 999, 8192])
def test_a_prompt_has_exactly_the_number_of_tokens_asked_for(
    tokenizer: PreTrainedTokenizerFast, num_tokens: int
) -> None:
    assert len(documentation_prompt(tokenizer, num_tokens)) == num_tokens


def test_a_prompt_is_a_chat_with_the_document_then_the_question_and_the_answer_to_come(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = text_of(tokenizer, documentation_prompt(tokenizer))
    assert text.startswith(f"<|start|>user\n{quickstart_data.INSTRUCTION}{topics['assert'][:200]}")
    assert text.endswith(f"{quickstart_data.QUESTION}<|end|>\n<|start|>assistant\n")
    assert quickstart_data.PLACEHOLDER not in text


def test_the_text_of_a_prompt_answers_the_question(tokenizer: PreTrainedTokenizerFast) -> None:
    text = " ".join(text_of(tokenizer, documentation_prompt(tokenizer)).split())
    assert "if not expression: raise AssertionError" in text
    assert "emits no code for an assert statement when optimization is requested" in text


def test_a_prompt_is_the_same_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert documentation_prompt(tokenizer) == documentation_prompt(tokenizer)


def test_a_prompt_longer_than_the_documentation_reads_it_again(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_data, "topics", {"b": "second", "a": "first"})
    assert "first\n\n\nsecond\n\n\nfirst" in text_of(tokenizer, documentation_prompt(tokenizer, 600))


def test_a_cut_inside_of_a_character_leaves_whole_characters_and_the_exact_length(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_data, "topics", {"a": "\N{SNOWMAN}" * 2000})  # three tokens of one byte each
    for num_tokens in (600, 601, 602):
        ids = documentation_prompt(tokenizer, num_tokens)
        assert len(ids) == num_tokens
        assert "\ufffd" not in text_of(tokenizer, ids)


def test_a_prompt_with_no_room_for_a_document_is_refused_with_the_number_it_needs(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with pytest.raises(UsageError, match=r"a prompt of 20 tokens has no room .* set prompt_tokens to a larger number"):
        documentation_prompt(tokenizer, 20)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no chat template; use a chat model, or a plan of your own"):
        documentation_prompt(make_tokenizer(["text"], chat_template=None))


def test_a_chat_template_that_changes_messages_is_refused() -> None:
    shouting = CHAT_TEMPLATE.replace("| trim", "| upper")
    with pytest.raises(UsageError, match="changes the text of a message"):
        documentation_prompt(make_tokenizer(["text"], chat_template=shouting))


def test_the_group_has_four_responses_that_end_and_rewards_from_best_to_worst(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    group = quickstart_group(tokenizer)
    assert set(group) == {"prompt", "responses", "rewards"}
    assert len(group["prompt"]) == 2048
    assert [text_of(tokenizer, ids[:-1]) for ids in group["responses"]] == [text for text, _ in quickstart_data.ANSWERS]
    assert {ids[-1] for ids in group["responses"]} == {tokenizer.eos_token_id}
    assert group["rewards"] == [1.0, 0.7, 0.2, 0.0]
