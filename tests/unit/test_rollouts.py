"""Given rollouts: what is accepted, and that everything else is refused with file, line, group, response, position."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from stages.advantages import group_advantages
from stages.group_parser import parse_group
from stages.groups import Group, Response, group_record, require_trainable
from stages.losses import make_batch
from stages.rollouts import read_rollouts

VOCAB = 300
WHERE = "rollouts.jsonl line 3"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_tokenizer(*, pad: str = "</s>", template: str | None = TEMPLATE) -> Any:
    """Byte-level BPE that merges ``ab`` and puts <s> before a prompt: bytes are ids 2.., specials 0 and 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    backend = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token=pad, chat_template=template)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def parse(record: Any, tokenizer: Any = None, **options: Any) -> Group:
    return parse_group(record, where=WHERE, tokenizer=tokenizer, vocab_size=VOCAB, **options)


def record(**changes: Any) -> dict[str, Any]:
    """A good record of two responses, given as ids; a value of None leaves a key out."""
    good = {"prompt": [1, 2, 3], "responses": [[4, 5], [6]], "rewards": [1.0, 0.0]}
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


def refused(message: str, tokenizer: Any = None, given: Any = None, **changes: Any) -> None:
    with pytest.raises(UsageError) as caught:
        parse(record(**changes) if given is None else given, tokenizer, group=2)
    assert str(caught.value).startswith(f"{WHERE}, group 2")
    assert message in str(caught.value)


def write(tmp_path: Path, *lines: Any, name: str = "rollouts.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def read(path: Path, tokenizer: Any = None, **options: Any) -> tuple[Group, ...]:
    return read_rollouts(path, tokenizer=tokenizer, vocab_size=VOCAB, **options)


# What is accepted


def test_ids_are_kept_as_they_are_and_masks_come_from_lengths() -> None:
    group = parse(record())
    assert group == Group(
        prompt_ids=(1, 2, 3),
        responses=(
            Response(token_ids=(4, 5), mask=(True, True), reward=1.0),
            Response(token_ids=(6,), mask=(True,), reward=0.0),
        ),
        source=WHERE,
    )


def test_a_text_prompt_gets_the_tokenizers_own_special_tokens_and_a_response_gets_none(tokenizer: Any) -> None:
    group = parse(record(prompt="hi", responses=["ab", ""]), tokenizer)
    assert group.prompt_ids == (tokenizer.bos_token_id, *ids_of(tokenizer, "hi"))
    assert [response.token_ids for response in group.responses] == [ids_of(tokenizer, "ab"), ()]


def test_chat_messages_go_through_the_template_with_the_generation_prompt(tokenizer: Any) -> None:
    group = parse(record(prompt=[{"role": "user", "content": "hi"}]), tokenizer)
    assert tokenizer.decode(group.prompt_ids) == "<s>user:hi</s><s>assistant:"


def test_a_template_that_answers_with_a_mapping_is_read_too(tokenizer: Any) -> None:
    stand_in = SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": [7, 8]})
    assert parse(record(prompt=[{"role": "user", "content": "hi"}]), stand_in).prompt_ids == (7, 8)


def test_no_end_of_sequence_is_added_unless_asked_for(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    given = record(responses=["x", [9, eos]], rewards=[1, 2])
    plain, ended = parse(given, tokenizer), parse(given, tokenizer, append_eos=True)
    assert plain.responses[0].token_ids == ids_of(tokenizer, "x")
    assert ended.responses[0].token_ids == (*ids_of(tokenizer, "x"), eos)
    assert ended.responses[1].token_ids == plain.responses[1].token_ids == (9, eos)


def test_an_end_of_sequence_equal_to_padding_is_trained_on_like_any_token(tokenizer: Any) -> None:
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 1
    group = parse(record(prompt=[1, 1, 5], responses=[[4, 1], [1, 1]]), tokenizer)
    assert [response.mask for response in group.responses] == [(True, True), (True, True)]


def test_ids_may_be_cut_otherwise_than_the_tokenizer_would(tokenizer: Any) -> None:
    cut = [*ids_of(tokenizer, "a"), *ids_of(tokenizer, "b")]
    assert len(ids_of(tokenizer, "ab")) == 1
    given = record(prompt="ab", prompt_ids=cut, responses=["ab", {"text": "ab", "token_ids": cut}])
    group = parse({**given, "response_ids": [cut, cut]}, tokenizer)
    assert group.prompt_ids == group.responses[0].token_ids == group.responses[1].token_ids == tuple(cut)


def test_ids_may_hold_the_special_tokens_that_text_leaves_out_at_its_ends(tokenizer: Any) -> None:
    prompt_ids = [tokenizer.bos_token_id, *ids_of(tokenizer, "hi")]
    stopped = [*ids_of(tokenizer, "ok"), tokenizer.eos_token_id]
    group = parse(
        record(
            prompt="hi",
            prompt_ids=prompt_ids,
            responses=["ok", "no</s>"],
            response_ids=[stopped, [*ids_of(tokenizer, "no"), tokenizer.eos_token_id]],
        ),
        tokenizer,
    )
    assert group.prompt_ids == tuple(prompt_ids)
    assert group.responses[0].token_ids == tuple(stopped)


def test_ids_of_chat_messages_may_be_given_beside_them(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = list(parse(record(prompt=messages), tokenizer).prompt_ids)
    assert parse(record(prompt=messages, prompt_ids=ids), tokenizer).prompt_ids == tuple(ids)
    refused("prompt: the token ids decode to", tokenizer, prompt=messages, prompt_ids=ids[:-1])


def test_a_tokenizer_that_drops_a_leading_space_agrees_with_text_that_keeps_it() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    make: Any = PreTrainedTokenizerFast
    words = make(tokenizer_object=backend, unk_token="<unk>")
    assert words.decode([1]) == "cat"
    given = record(prompt=[0], responses=[" cat", "cat"], response_ids=[[1], [1]])
    assert [response.token_ids for response in parse(given, words).responses] == [(1,), (1,)]
    refused("response 1: the token ids decode to 'cat', not to", words, given={**given, "responses": [" cat", " the"]})


def test_text_beside_ids_is_not_needed_so_without_a_tokenizer_the_ids_are_taken() -> None:
    group = parse(record(prompt="hi", prompt_ids=[1, 2], responses=["a", "b"], response_ids=[[3], [4]]))
    assert (group.prompt_ids, group.responses[1].token_ids) == ((1, 2), (4,))


def test_tool_output_inside_a_response_is_masked_and_kept() -> None:
    response = parse(record(responses=[[4, 5, 6], [7]], response_masks=[[1, 0, True], None])).responses[0]
    assert (response.token_ids, response.mask) == ((4, 5, 6), (True, False, True))


def test_empty_and_fully_masked_responses_stay_in_the_group() -> None:
    group = parse(record(responses=[[], [6], [7]], rewards=[1, 2, 3], response_masks=[[], [0], [1]]))
    assert [response.mask for response in group.responses] == [(), (False,), (True,)]
    assert group_advantages(group, scale=False).values == (-1.0, 0.0, 1.0)
    require_trainable([group])


def test_advantages_are_one_number_a_response_or_one_a_token() -> None:
    group = parse(record(rewards=None, advantages=[[0.5, -1], 2]))
    assert [response.advantage for response in group.responses] == [(0.5, -1.0), 2.0]


def test_log_probs_may_be_absent_for_single_responses_and_positive_by_rounding() -> None:
    group = parse(record(old_logprobs=[[-0.5, 1e-6], None], ref_logprobs=[[-1, 0], [-2]]))
    assert [response.old_logprobs for response in group.responses] == [(-0.5, 1e-6), None]
    batch = make_batch([group], [group_advantages(group)], torch.float64)
    assert batch.has_old.tolist() == [True, True, False]


def test_plans_may_pass_arrays_and_tensors() -> None:
    arrays = record(prompt=np.array([1, 2, 3]), responses=[torch.tensor([4, 5]), np.array([6])], rewards=np.ones(2))
    assert parse(arrays) == parse(record(rewards=[1.0, 1.0]))
    assert parse(record(prompt=[np.int64(1)], rewards=[np.float32(1), 0])).prompt_ids == (1,)


def test_a_null_counts_as_absent_and_metadata_may_hold_anything() -> None:
    assert parse({**record(), "advantages": None, "metadata": {"attention_mask": [0], "x": [None]}}) == parse(record())


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=5)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    kinds = draw(st.sampled_from(["reward", "advantage", "both"]))

    def response() -> Response:
        ids = tuple(draw(IDS))
        per_token = st.lists(FINITE, min_size=len(ids), max_size=len(ids)).map(tuple)
        logprobs = st.none() | st.lists(
            st.floats(max_value=0, allow_infinity=False, allow_nan=False), min_size=len(ids), max_size=len(ids)
        ).map(tuple)
        return Response(
            token_ids=ids,
            mask=tuple(draw(st.booleans()) for _ in ids),
            reward=draw(FINITE) if kinds != "advantage" else None,
            advantage=draw(FINITE | per_token) if kinds != "reward" else None,
            old_logprobs=draw(logprobs),
            ref_logprobs=draw(logprobs),
        )

    return Group(
        prompt_ids=tuple(draw(IDS.filter(len))),
        responses=tuple(response() for _ in range(draw(st.integers(1, 3)))),
        source=WHERE,
    )


@given(groups())
def test_a_group_survives_being_written_as_json_and_read_again(group: Group) -> None:
    assert parse(json.loads(json.dumps(group_record(group)))) == group


# Files


def test_a_file_gives_one_group_a_line_and_skips_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path, record(), b"  ", {**record(), "metadata": "\u2028 is no end of line"})
    assert [group.source for group in read(path)] == ["rollouts.jsonl line 1", "rollouts.jsonl line 3"]


def test_a_byte_order_mark_and_windows_line_ends_are_harmless(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(record()).encode() + b"\r")
    assert len(read(path)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": [1,', "rollouts.jsonl line 2: not JSON: Expecting value at column"),
        (b"[1, 2]", "rollouts.jsonl line 2, group 1: a group is a JSON object, not [1, 2] (list)"),
        (b'"text"', "rollouts.jsonl line 2, group 1: a group is a JSON object, not 'text' (str)"),
        (b'{"prompt": "\xff"}', "rollouts.jsonl line 2: not UTF-8 at byte 12"),
        (b'{"rewards": [1], "rewards": [2]}', "rollouts.jsonl line 2: key 'rewards' appears more than once"),
        (b"[" * 100_000, "rollouts.jsonl line 2: not JSON that can be read"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "rollouts.jsonl line 2: not JSON that can be read"),
        (
            b'{"prompt": [1], "responses": [[2], [3]], "rewards": [0, NaN]}',
            "rollouts.jsonl line 2, group 1, response 1: reward is not finite: nan",
        ),
        (
            b'{"prompt": [1], "responses": [[2, 3]], "rewards": [0], "old_logprobs": [[-1, -Infinity]]}',
            "rollouts.jsonl line 2, group 1, response 0, position 1: old_logprobs entry is not finite: -inf",
        ),
        (
            b'{"prompt": [1], "responses": [[2]], "advantages": [1e999]}',
            "rollouts.jsonl line 2, group 1, response 0: advantage is not finite: inf",
        ),
        (
            b'{"prompt": [1], "responses": [[2]], "rewards": [1' + b"0" * 400 + b"]}",
            "rollouts.jsonl line 2, group 1, response 0: reward is not finite: 1000",
        ),
        (
            b'{"prompt": [1], "responses": [[2, 300]], "rewards": [1]}',
            "rollouts.jsonl line 2, group 1, response 0, position 1: token id 300 is outside the vocabulary",
        ),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:60],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(write(tmp_path, record(), line))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is empty; write one group a line"):
        read(path)


def test_a_missing_file_a_folder_and_another_kind_of_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read the rollouts file '.*none\.jsonl': No such file"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UsageError, match="can't read the rollouts file"):
        read(tmp_path / "folder.jsonl")
    with pytest.raises(UsageError, match=r"ends in '\.csv'; give JSON Lines \(\.jsonl\) or \.parquet"):
        read(tmp_path / "rollouts.csv")


def test_parquet_gives_the_same_groups_as_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [record(old_logprobs=[[-1.0, -2.0], None]), record(prompt=[9])]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rollouts.parquet")
    rows_read, lines_read = read(tmp_path / "rollouts.parquet"), read(write(tmp_path, *rows))
    assert [group.source for group in rows_read] == ["rollouts.parquet row 1", "rollouts.parquet row 2"]
    assert [(group.prompt_ids, group.responses) for group in rows_read] == [
        (group.prompt_ids, group.responses) for group in lines_read
    ]
    with pytest.raises(UsageError, match="is not a Parquet file that can be read"):
        read(write(tmp_path, b"no parquet", name="broken.parquet"))


def test_parquet_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs the package pyarrow; run `pip install pyarrow`"):
        read(write(tmp_path, record(), name="rollouts.parquet"))


# What is refused


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (VOCAB, "token id 300 is outside the vocabulary: ids go from 0 to 299"),
        (-1, "token id -1 is outside the vocabulary"),
        (1.0, "token id 1.0 is not an integer"),
        (True, "token id True is not an integer"),
        ("4", "token id '4' is not an integer"),
        (None, "token id None is not an integer"),
    ],
)
def test_a_wrong_token_id_is_refused_with_group_response_and_position(token: Any, message: str) -> None:
    refused(f"group 2, response 1, position 2: {message}", responses=[[4], [5, 6, token]])
    refused(f"group 2, prompt, position 1: {message}", prompt=[1, token])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "there is no prompt; add it as text"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 5}, "prompt is 5 (int); give text, chat messages or token ids"),
        ({"prompt_ids": [1, 2]}, "prompt: token ids are given twice and differ: (1, 2, 3) and (1, 2)"),
        ({"responses": None}, "there are no responses"),
        ({"responses": []}, "there are no responses"),
        ({"responses": "text"}, "responses is 'text' (str), not a list"),
        ({"responses": [[4], 5]}, "response 1: a response is text, token ids or an object, not 5 (int)"),
        ({"responses": [[4], None]}, "response 1: neither text nor token ids are given"),
        ({"responses": [[4], {"ids": [5]}]}, "response 1: unknown keys ['ids']; a response object has text"),
        ({"responses": [[4], {"text": 5}]}, "response 1: text is 5 (int), not a string"),
        ({"response_ids": [[4, 5]]}, "response_ids has 1 entries for 2 responses"),
        ({"response_ids": [[4, 5], [7]]}, "response 1: token ids are given twice and differ: (6,) and (7,)"),
        ({"rewards": None}, "neither rewards nor advantages are given"),
        ({"rewards": [1]}, "rewards has 1 entries for 2 responses"),
        ({"rewards": 1.0}, "rewards is 1.0 (float), not a list"),
        ({"rewards": [1, True]}, "response 1: reward is True, not a number"),
        ({"rewards": [1, None]}, "response 1: reward is None, not a number"),
        ({"rewards": [math.inf, 0]}, "response 0: reward is not finite: inf"),
        ({"advantages": [1, math.nan]}, "response 1: advantage is not finite: nan"),
        ({"advantages": [[1, math.nan], 0]}, "response 0, position 1: advantage is not finite: nan"),
        ({"advantages": [[1], 0]}, "response 0: advantages has 1 entries for 2 tokens"),
        ({"old_logprobs": [[-1, -1]]}, "old_logprobs has 1 entries for 2 responses"),
        ({"old_logprobs": [[-1, -1], [-1, -1]]}, "response 1: old_logprobs has 2 entries for 1 tokens"),
        ({"old_logprobs": [[-1, 0.1], [-1]]}, "response 0, position 1: old_logprobs entry is 0.1, but a log"),
        ({"ref_logprobs": [[-1, math.nan], [-1]]}, "response 0, position 1: ref_logprobs entry is not finite: nan"),
        ({"ref_logprobs": [[-1, None], [-1]]}, "response 0, position 1: ref_logprobs entry is None, not a number"),
        ({"response_masks": [[1, 1], [1, 1]]}, "response 1: response_masks has 2 entries for 1 tokens"),
        ({"response_masks": [[1, 2], [1]]}, "response 0, position 1: a mask entry is 2; write 0 or 1"),
        ({"response_masks": [[1, 1.0], [1]]}, "response 0, position 1: a mask entry is 1.0; write 0 or 1"),
        ({"reward": [1]}, "unknown keys ['reward']; known are prompt, prompt_ids, responses, response_ids, rewards"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else None,
)
def test_a_record_that_does_not_add_up_is_refused_with_its_place(changes: dict[str, Any], message: str) -> None:
    refused(message, **changes)


def test_text_without_a_tokenizer_says_what_to_give_instead() -> None:
    refused("prompt: given as text, but there is no tokenizer; give token ids", prompt="hi")
    refused("response 0: given as text, but there is no tokenizer; give token ids", responses=["a", "b"])
    with pytest.raises(UsageError, match="response 0: append_eos is set, but no tokenizer"):
        parse(record(), append_eos=True)


def test_ids_that_do_not_decode_to_the_text_given_with_them_are_refused(tokenizer: Any) -> None:
    right, wrong = list(ids_of(tokenizer, "ab")), list(ids_of(tokenizer, "ac"))
    message = "the token ids decode to 'ac', not to the text given with them, 'ab'"
    refused(f"prompt: {message}", tokenizer, prompt="ab", prompt_ids=wrong)
    refused(f"response 1: {message}", tokenizer, responses=["ab", "ab"], response_ids=[right, wrong])
    refused(f"response 0: {message}", tokenizer, responses=[{"text": "ab", "token_ids": wrong}, [5]])
    refused("response 0: the token ids decode to", tokenizer, responses=[{"text": "ab", "token_ids": []}, [5]])
    inside = [*ids_of(tokenizer, "a"), tokenizer.eos_token_id, *ids_of(tokenizer, "b")]
    refused(
        "response 0: the token ids decode to 'a</s>b'", tokenizer, responses=[{"text": "ab", "token_ids": inside}, []]
    )


@pytest.mark.parametrize("key", ["attention_mask", "prompt_mask"])
def test_padding_on_the_left_is_refused_with_that_reason(key: str) -> None:
    refused("shows padding on the left", given={**record(), key: [0, 1, 1]})
    refused("shows padding on the left", given={**record(), key: [[1, 1, 1], [0, 1, 1]]})
    refused("shows padding;", given={**record(), key: [1, 1, 0]})
    refused("shows no padding;", given={**record(), key: [1, 1, 1]})


def test_ids_that_begin_with_several_padding_tokens_are_padding_on_the_left() -> None:
    padded = byte_tokenizer(pad="<pad>")
    pad = padded.pad_token_id
    refused(
        f"prompt: padding on the left: the ids begin with the tokenizer's padding token {pad} twice",
        padded,
        prompt=[pad, pad, 5],
    )
    refused("response 1: padding on the left", padded, responses=[[4], [pad, pad, 5]])
    assert parse(record(prompt=[pad, 5], responses=[[4, pad, pad], [5]]), padded).prompt_ids == (pad, 5)
    meant = record(prompt="<pad><pad>a", prompt_ids=[pad, pad, *ids_of(padded, "a")])
    assert parse(meant, padded).prompt_ids[:2] == (pad, pad)


def test_messages_that_the_template_refuses_and_wrong_messages_are_refused(tokenizer: Any) -> None:
    refused(
        "prompt: the tokenizer's chat template refuses these messages: no robots",
        tokenizer,
        prompt=[{"role": "robot", "content": "hi"}],
    )
    refused(
        "prompt: chat message 1 is 'hi'; give objects with role and content",
        tokenizer,
        prompt=[{"role": "user", "content": "hi"}, "hi"],
    )
    refused(
        "prompt: the tokenizer's chat template refuses",
        byte_tokenizer(template=None),
        prompt=[{"role": "user", "content": "hi"}],
    )


def test_lists_of_one_entry_a_token_count_an_appended_end_of_sequence(tokenizer: Any) -> None:
    given = record(responses=[[4], [5]], old_logprobs=[[-1.0], [-1.0]])
    with pytest.raises(UsageError, match=r"has 1 entries for 2 tokens.*append_eos is set"):
        parse(given, tokenizer, append_eos=True)
    given["old_logprobs"] = [[-1.0, -2.0], [-1.0, -2.0]]
    assert parse(given, tokenizer, append_eos=True).responses[0].old_logprobs == (-1.0, -2.0)


def test_a_tokenizer_of_a_larger_vocabulary_than_the_policy_is_noticed(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"response 0, position 0: token id \d+ is outside the vocabulary"):
        parse_group(record(responses=["z", []]), where=WHERE, tokenizer=tokenizer, vocab_size=20)


def test_text_that_no_tokenizer_takes_is_refused_with_its_place(tokenizer: Any) -> None:
    refused("response 0: the tokenizer refuses", tokenizer, responses=["\ud800", "a"])


def test_a_batch_without_a_trainable_token_is_refused_before_any_work() -> None:
    nothing = parse(record(responses=[[], [6]], response_masks=[[], [0]]))
    with pytest.raises(UsageError) as caught:
        require_trainable([nothing, nothing])
    assert re.search("nothing to train on: 2 groups with 4 responses of 2 tokens in all", str(caught.value))
    require_trainable([nothing, parse(record())])
