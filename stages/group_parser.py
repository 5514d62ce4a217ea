"""From a record to a group: one set of rules and one set of messages, whatever the record came from.

* Token ids win over text. Where both are given the ids must decode to the text; how they are cut is their business,
  since they are what the policy sampled. Nothing that came as ids is tokenized again.
* Masks come from lengths, never from ids: end-of-sequence and padding may be the same id.
* What is wrong is refused with its place. Groups, responses and positions count from 0, as the lists in a file do.

Knows no torch and no model: a rollouts file can be checked on a laptop.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NoReturn

from engine.errors import UsageError
from stages.groups import Group, Response

KNOWN_KEYS = (
    "prompt",
    "prompt_ids",
    "responses",
    "response_ids",
    "rewards",
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "response_masks",
    "metadata",
)
RESPONSE_KEYS = ("text", "token_ids")
_PADDING_KEYS = ("attention_mask", "prompt_mask")

LOGPROB_SLACK = 1e-4
# A log-prob computed as logit - logsumexp in float32 may come out above 0 by rounding of the logits, not by more.

_CONTEXT_TOKENS = 8
# Some tokenizers drop the space before the first token they decode; a few prompt tokens before it keep the space.


def parse_group(
    record: Mapping[str, Any],
    *,
    where: str,
    tokenizer: Any,
    vocab_size: int,
    append_eos: bool = False,
    group: int | None = None,
) -> Group:
    """Return the group that ``record`` describes, checked.

    Keys (a null counts as absent): ``prompt`` (text, chat messages or token ids) and ``prompt_ids``; ``responses``
    (texts, id lists, or objects with ``text`` and ``token_ids``) and ``response_ids``; ``rewards`` (a number a
    response) or ``advantages`` (a number a response, or a list of one number a token); ``old_logprobs``,
    ``ref_logprobs`` and ``response_masks`` (one list a response, one entry a token; null for a response without);
    ``metadata`` (anything, ignored). Given advantages win over rewards: see ``stages/advantages.py``.

    A text prompt is tokenized as the tokenizer does by default, so special tokens that it puts around a prompt (a
    beginning-of-sequence token, say) are added. Chat messages go through its template with the generation prompt.
    Response text is tokenized without special tokens. Ids given beside a text must decode to it (special tokens are
    part of the text); one special token at the end that the text leaves out, and special tokens that the tokenizer
    itself puts around a prompt, are accepted. Without a tokenizer, text beside ids cannot be checked and is ignored.

    Args:
        record: a JSON object; numpy arrays and torch tensors are accepted for lists.
        where: the place for messages, such as ``rollouts.jsonl line 3``.
        tokenizer: a Hugging Face tokenizer, or None where everything is given as ids.
        vocab_size: rows of the policy's embedding; every id is below it.
        append_eos: end every response in the tokenizer's end-of-sequence token, unless it already does. Lists with
            one entry a token count that token.
        group: the group's number for messages, counted from 0.

    Raises:
        UsageError: anything is missing, unknown, of the wrong length, not finite or outside the vocabulary.
    """
    parser = _Parser(where=where, group=group, tokenizer=tokenizer, vocab_size=vocab_size, append_eos=append_eos)
    return parser.group_of(record)


@dataclass(frozen=True, kw_only=True)
class _Parser:
    """The rules for one group. Methods raise through :meth:`fail`, so that every message carries its place."""

    where: str
    group: int | None
    tokenizer: Any
    vocab_size: int
    append_eos: bool

    def fail(self, problem: str, *, part: str | int | None = None, position: int | None = None) -> NoReturn:
        place = self.where
        if self.group is not None:
            place += f", group {self.group}"
        if part is not None:
            place += f", {_name_of(part)}"
        if position is not None:
            place += f", position {position}"
        raise UsageError(f"{place}: {problem}")

    def group_of(self, record: Mapping[str, Any]) -> Group:
        given = self.known_keys(record)
        prompt_ids = self.prompt(given.get("prompt"), given.get("prompt_ids"))
        responses = self.responses(given, prompt_ids)
        if "rewards" not in given and "advantages" not in given:
            self.fail("neither rewards nor advantages are given; add one of them, with one entry a response")
        column = {key: self.column(given, key, len(responses)) for key in KNOWN_KEYS[4:9]}
        return Group(
            prompt_ids=prompt_ids,
            responses=tuple(
                Response(
                    token_ids=ids,
                    mask=self.mask(column["response_masks"][index], ids, index),
                    reward=self.number(column["rewards"][index], "reward", index) if "rewards" in given else None,
                    advantage=self.advantage(column["advantages"][index], ids, index)
                    if "advantages" in given
                    else None,
                    old_logprobs=self.logprobs(column["old_logprobs"][index], "old_logprobs", ids, index),
                    ref_logprobs=self.logprobs(column["ref_logprobs"][index], "ref_logprobs", ids, index),
                )
                for index, ids in enumerate(responses)
            ),
            source=self.where,
        )

    def known_keys(self, record: Any) -> dict[str, Any]:
        if not isinstance(record, Mapping):
            self.fail(f"a group is a JSON object, not {_kind(record)}; write {{'prompt': ..., 'responses': ...}}")
        given = {key: value for key, value in record.items() if value is not None}
        for key in _PADDING_KEYS:
            if key in given:
                self.refuse_padding(key, given[key])
        unknown = [key for key in given if key not in KNOWN_KEYS]
        if unknown:
            self.fail(f"unknown keys {unknown!r}; known are {', '.join(KNOWN_KEYS)} (metadata may hold anything)")
        return given

    def refuse_padding(self, key: str, value: Any) -> NoReturn:
        rows = self.items(value, key)
        rows = rows if rows and isinstance(rows[0], list | tuple) else [rows]
        left = any(len(row) > 0 and not row[0] for row in rows)
        shows = "padding on the left" if left else "padding" if not all(map(all, rows)) else "no padding"
        self.fail(
            f"{key} is not accepted, and this one shows {shows}; masks come from lengths: "
            "give ids without padding and leave the key out"
        )

    def prompt(self, prompt: Any, prompt_ids: Any) -> tuple[int, ...]:
        prompt = _plain(prompt)
        if prompt is None and prompt_ids is None:
            self.fail("there is no prompt; add it as text, chat messages or token ids")
        is_chat = isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if prompt is not None and not isinstance(prompt, str | list | tuple):
            self.fail(f"prompt is {_kind(prompt)}; give text, chat messages or token ids")
        text = prompt if isinstance(prompt, str) or is_chat else None
        ids = self.merge_ids(None if text is not None else prompt, prompt_ids, "prompt")
        if (text is not None and len(text) == 0) or ids == ():
            self.fail("the prompt is empty; give at least one token: its last token opens every response")
        if ids is None:
            ids = self.checked_ids(self.prompt_tokens(text), "prompt")
            if not ids:
                self.fail(f"the tokenizer makes no token of the prompt {_brief(text)}; give a prompt with tokens")
        elif text is not None and self.tokenizer is not None:
            self.check_prompt_text(ids, text)
        elif text is None:
            self.refuse_left_pads(ids, "prompt")
        return ids

    def prompt_tokens(self, prompt: Any) -> list[int]:
        self.need_tokenizer("prompt")
        if isinstance(prompt, str):
            return self.tokens(prompt, "prompt", add_special_tokens=True)
        for position, message in enumerate(prompt):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                self.fail(
                    f"chat message {position} is {_brief(message)}; give objects with role and content", part="prompt"
                )
        try:
            made = self.tokenizer.apply_chat_template(
                [dict(message) for message in prompt], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates are programs of the checkpoint's author and may raise anything
            self.fail(f"the tokenizer's chat template refuses these messages: {error}; give text or ids", part="prompt")
        made = made["input_ids"] if isinstance(made, Mapping) else made
        return list(_plain(made))

    def check_prompt_text(self, ids: tuple[int, ...], text: Any) -> None:
        if isinstance(text, str) and self.decode(ids, "prompt") == text:
            return
        own = tuple(self.prompt_tokens(text))
        if own != ids and self.decode(own, "prompt") != self.decode(ids, "prompt"):
            self.disagree(ids, text, "prompt")

    def responses(self, given: Mapping[str, Any], prompt_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
        entries = self.items(given["responses"], "responses") if "responses" in given else None
        id_lists = self.items(given["response_ids"], "response_ids") if "response_ids" in given else None
        if not (entries if entries is not None else id_lists):
            self.fail("there are no responses; give at least one, as text or token ids")
        if entries is None or id_lists is None:
            num_responses = len(entries or id_lists or ())
        else:
            num_responses = len(entries)
            self.same_length("response_ids", len(id_lists), num_responses, "responses")
        entries = entries if entries is not None else [None] * num_responses
        id_lists = id_lists if id_lists is not None else [None] * num_responses
        pairs = zip(entries, id_lists, strict=True)
        return [self.response(entry, ids, index, prompt_ids) for index, (entry, ids) in enumerate(pairs)]

    def response(self, entry: Any, beside: Any, index: int, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        text, entry_ids = self.split_entry(_plain(entry), index)
        ids = self.merge_ids(entry_ids, beside, index)
        if ids is None:
            if text is None:
                self.fail("neither text nor token ids are given; an empty response is written [] or ''", part=index)
            self.need_tokenizer(index)
            ids = self.checked_ids(self.tokens(text, index, add_special_tokens=False), index)
        elif text is not None and self.tokenizer is not None:
            if not self.decodes_to(ids, text, index, prompt_ids[-_CONTEXT_TOKENS:]):
                self.disagree(ids, text, index)
        elif text is None:
            self.refuse_left_pads(ids, index)
        return self.with_eos(ids, index) if self.append_eos else ids

    def split_entry(self, entry: Any, index: int) -> tuple[str | None, Any]:
        if entry is None or isinstance(entry, str):
            return entry, None
        if isinstance(entry, list | tuple):
            return None, entry
        if not isinstance(entry, Mapping):
            self.fail(f"a response is text, token ids or an object, not {_kind(entry)}", part=index)
        unknown = [key for key in entry if key not in RESPONSE_KEYS]
        if unknown:
            self.fail(f"unknown keys {unknown!r}; a response object has {' and '.join(RESPONSE_KEYS)}", part=index)
        text = entry.get("text")
        if text is not None and not isinstance(text, str):
            self.fail(f"text is {_kind(text)}, not a string", part=index)
        return text, entry.get("token_ids")

    def with_eos(self, ids: tuple[int, ...], index: int) -> tuple[int, ...]:
        eos = getattr(self.tokenizer, "eos_token_id", None)
        if eos is None:
            self.fail("append_eos is set, but no tokenizer with an end-of-sequence token is given", part=index)
        return ids if ids and ids[-1] == eos else ids + self.checked_ids([eos], index)

    def merge_ids(self, first: Any, second: Any, part: str | int) -> tuple[int, ...] | None:
        given = [self.checked_ids(ids, part) for ids in (first, second) if ids is not None]
        if len(given) == 2 and given[0] != given[1]:
            self.fail(f"token ids are given twice and differ: {_brief(given[0])} and {_brief(given[1])}", part=part)
        return given[0] if given else None

    def checked_ids(self, value: Any, part: str | int) -> tuple[int, ...]:
        ids = self.items(value, "the list of token ids", part)
        for position, token in enumerate(ids):
            if type(token) is int and 0 <= token < self.vocab_size:
                continue  # the only path that millions of prompt tokens take
            if isinstance(token, bool) or not isinstance(token, Integral):
                self.fail(f"token id {_brief(token)} is not an integer", part=part, position=position)
            if not 0 <= int(token) < self.vocab_size:
                self.fail(
                    f"token id {token} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}; "
                    "rollouts and policy must share one tokenizer",
                    part=part,
                    position=position,
                )
        return tuple(int(token) for token in ids)

    def refuse_left_pads(self, ids: tuple[int, ...], part: str | int) -> None:
        """Two padding tokens in front are padding; one may be a model's way to begin, and so may end-of-sequence."""
        pad = getattr(self.tokenizer, "pad_token_id", None)
        markers = {getattr(self.tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")}
        if pad is not None and pad not in markers and ids[:2] == (pad, pad):
            self.fail(
                f"padding on the left: the ids begin with the tokenizer's padding token {pad} twice, and the policy "
                "would see them as text; remove them, or give the text beside the ids if they are meant",
                part=part,
            )

    def decodes_to(self, ids: tuple[int, ...], text: str, part: int, before: tuple[int, ...]) -> bool:
        spellings = [ids]
        if ids and self.decode(ids[-1:], part, skip_special_tokens=True) == "":
            spellings.append(ids[:-1])  # engines stop at a special token and leave it out of the text
        if any(self.decode(spelling, part) == text for spelling in spellings):
            return True
        head = self.decode(before, part)
        if any(self.decode(before + spelling, part) == head + text for spelling in spellings):
            return True
        own = self.decode(self.tokens(text, part, add_special_tokens=False), part)
        return any(self.decode(spelling, part) == own for spelling in spellings)

    def disagree(self, ids: tuple[int, ...], text: Any, part: str | int) -> NoReturn:
        self.fail(
            f"the token ids decode to {_brief(self.decode(ids, part))}, not to the text given with them, "
            f"{_brief(text)}; correct one of them, or leave the text out",
            part=part,
        )

    def need_tokenizer(self, part: str | int) -> None:
        if self.tokenizer is None:
            self.fail("given as text, but there is no tokenizer; give token ids, or a tokenizer", part=part)

    def tokens(self, text: str, part: str | int, *, add_special_tokens: bool) -> list[int]:
        try:
            made = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        except Exception as error:  # such as lone surrogates, which no tokenizer takes; their types differ
            self.fail(f"the tokenizer refuses {_brief(text)}: {error}", part=part)
        return list(made["input_ids"])

    def decode(self, ids: Sequence[int], part: str | int, *, skip_special_tokens: bool = False) -> str:
        try:
            return str(
                self.tokenizer.decode(
                    list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
                )
            )
        except Exception as error:  # ids between the tokenizer's size and the embedding's, with some tokenizers
            self.fail(f"the tokenizer can't decode {_brief(ids)}: {error}", part=part)

    def column(self, given: Mapping[str, Any], key: str, num_responses: int) -> list[Any]:
        if key not in given:
            return [None] * num_responses
        entries = self.items(given[key], key)
        self.same_length(key, len(entries), num_responses, "responses")
        return [_plain(entry) for entry in entries]

    def same_length(self, key: str, found: int, expected: int, of: str) -> None:
        if found != expected:
            self.fail(f"{key} has {found} entries for {expected} {of}; give one entry each")

    def per_token(self, value: Any, key: str, ids: tuple[int, ...], index: int) -> list[Any]:
        entries = self.items(value, key, index)
        if len(entries) != len(ids):
            hint = "; append_eos is set, and the appended token counts" if self.append_eos else ""
            self.fail(
                f"{key} has {len(entries)} entries for {len(ids)} tokens; give one entry a token, and the response as "
                f"token ids, since text may be cut otherwise{hint}",
                part=index,
            )
        return entries

    def mask(self, value: Any, ids: tuple[int, ...], index: int) -> tuple[bool, ...]:
        if value is None:
            return (True,) * len(ids)
        bits = self.per_token(value, "response_masks", ids, index)
        for position, bit in enumerate(bits):
            if not isinstance(bit, bool | Integral) or bit not in (0, 1):
                self.fail(f"a mask entry is {_brief(bit)}; write 0 or 1", part=index, position=position)
        return tuple(bool(bit) for bit in bits)

    def advantage(self, value: Any, ids: tuple[int, ...], index: int) -> float | tuple[float, ...]:
        if not isinstance(value, list | tuple):
            return self.number(value, "advantage", index)
        numbers = self.per_token(value, "advantages", ids, index)
        return tuple(self.number(item, "advantage", index, position) for position, item in enumerate(numbers))

    def logprobs(self, value: Any, key: str, ids: tuple[int, ...], index: int) -> tuple[float, ...] | None:
        if value is None:
            return None
        numbers = []
        for position, item in enumerate(self.per_token(value, key, ids, index)):
            number = self.number(item, f"{key} entry", index, position)
            if number > LOGPROB_SLACK:
                self.fail(
                    f"{key} entry is {number!r}, but a log-prob is at most 0; give natural logarithms of probabilities",
                    part=index,
                    position=position,
                )
            numbers.append(number)
        return tuple(numbers)

    def number(self, value: Any, what: str, index: int, position: int | None = None) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            self.fail(f"{what} is {_brief(value)}, not a number", part=index, position=position)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.fail(f"{what} is not finite: {_brief(value)}; give a finite number", part=index, position=position)
        return number

    def items(self, value: Any, key: str, part: str | int | None = None) -> list[Any]:
        value = _plain(value)
        if not isinstance(value, list | tuple):
            self.fail(f"{key} is {_kind(value)}, not a list", part=part)
        return list(value)


def _name_of(part: str | int) -> str:
    return part if isinstance(part, str) else f"response {part}"


def _plain(value: Any) -> Any:
    """Arrays and tensors as Python lists, everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _kind(value: Any) -> str:
    return f"{_brief(value)} ({type(value).__name__})"


def _brief(value: Any) -> str:
    return reprlib.repr(value)
