"""Random numbers are a pure function of their counter, tokens are its image under the inverse distribution.

And the machinery of decoding: tails that branches leave, attention of one query to all its own keys, costs.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from engine.errors import UnsupportedModelError, UsageError
from engine.memory import DEVICE, LiveBytes
from models import head as heads
from models.attention import paged_attention
from models.decode import Tail
from models.geometry import Geometry
from stages.sampling import UNIFORM_BITS, SamplingOptions, random_bits, rollout_value, uniform

LARGEST_UNIFORM = 1 - 2.0**-53

# Random numbers


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 written out from Salmon et al., 2011, section 3.3 and table 2."""
    word = 2**64
    for _ in range(10):
        low, high = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [high // word ^ counter[1] ^ key[0], high % word, low // word ^ counter[3] ^ key[1], low % word]
        key = [(key[0] + 0x9E3779B97F4A7C15) % word, (key[1] + 0xBB67AE8584CAA73B) % word]
    return counter


@given(st.integers(0, 2**63 - 1), *[st.integers(0, 2**31)] * 4)
def test_random_numbers_are_those_of_philox(seed: int, step: int, group: int, response: int, position: int) -> None:
    counter = [position + 1, response, group, 0]  # numpy counts before it draws
    assert random_bits(seed, step, group, response, position) == philox(counter, [seed, step])[0] >> 11


def test_the_stream_is_the_one_that_earlier_runs_had() -> None:
    """A change here means that no earlier run can be reproduced."""
    assert [random_bits(*key) for key in PINNED] == list(PINNED.values())


PINNED = {
    (0, 0, 0, 0, 0): 104_003_916_602_523,
    (1, 0, 0, 0, 0): 2_734_297_772_371_024,
    (0, 1, 0, 0, 0): 7_326_042_091_893_818,
    (0, 0, 1, 0, 0): 5_797_364_303_799_309,
    (0, 0, 0, 1, 0): 1_908_261_127_127_924,
    (0, 0, 0, 0, 1): 4_525_033_197_209_392,
    (2**63 - 1, 7, 11, 13, 1_000_000): 6_858_442_594_338_566,
}


def test_uniform_numbers_are_the_bits_over_their_range_and_below_one() -> None:
    for key in PINNED:
        assert uniform(*key) * 2**UNIFORM_BITS == random_bits(*key)
        assert 0 <= uniform(*key) < 1


def test_no_two_keys_share_a_number_and_no_argument_stands_for_another() -> None:
    keys = list(itertools.product(range(4), repeat=5))
    assert len({random_bits(*key) for key in keys}) == len(keys)


STREAMS = {
    "positions": lambda number: (0, 0, 0, 0, number),
    "responses": lambda number: (0, 0, 0, number, 0),
    "groups": lambda number: (0, 0, number, 0, 0),
    "steps": lambda number: (0, number, 0, 0, 0),
    "seeds": lambda number: (number, 0, 0, 0, 0),
}


@pytest.mark.parametrize("along", STREAMS)
def test_numbers_are_uniform_along_every_argument(along: str) -> None:
    """The largest distance of the empirical distribution (Kolmogorov-Smirnov) passes 2.2 once in ten thousand."""
    count = 4000
    found = sorted(uniform(*STREAMS[along](number)) for number in range(count))
    distance = max(max((rank + 1) / count - value, value - rank / count) for rank, value in enumerate(found))
    assert distance * math.sqrt(count) < 2.2


@pytest.mark.parametrize("along", STREAMS)
def test_neighbours_along_every_argument_are_not_correlated(along: str) -> None:
    """A correlation of n pairs is normal with deviation 1 / sqrt(n): four of them pass once in ten thousand."""
    count = 4000
    found = torch.tensor([uniform(*STREAMS[along](number)) for number in range(count + 1)], dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack([found[:-1], found[1:]]))[0, 1].item()
    assert abs(correlation) * math.sqrt(count) < 4


# From numbers to tokens

HIDDEN = 5


def token_head(vocabulary: int, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(vocabulary)
    return nn.Linear(HIDDEN, vocabulary, bias=True, dtype=dtype)


def chosen(
    head: nn.Linear,
    hidden: torch.Tensor,
    uniforms: list[float],
    *,
    temperature: float = 1.0,
    greedy: bool = False,
    block_rows: int = 4,
) -> list[int]:
    """Return the tokens that are drawn for rows."""
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    ids, _ = heads.sample_rows(head, hidden, numbers, temperature=temperature, greedy=greedy, block_rows=block_rows)
    found: list[int] = ids.tolist()
    return found


@given(
    vocabulary=st.integers(1, 40),
    uniforms=st.lists(st.floats(0, LARGEST_UNIFORM), min_size=1, max_size=9),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    block_rows=st.integers(1, 10),
)
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number(
    vocabulary: int, uniforms: list[float], temperature: float, block_rows: int
) -> None:
    head, hidden = token_head(vocabulary), torch.randn(len(uniforms), HIDDEN, dtype=torch.float64)
    found = chosen(head, hidden, uniforms, temperature=temperature, block_rows=block_rows)
    for token, number, row in zip(found, uniforms, torch.softmax(head(hidden) / temperature, -1).tolist(), strict=True):
        assert math.fsum(row[:token]) <= number + 1e-12
        assert math.fsum(row[: token + 1]) > number - 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_token_of_probability_zero_is_never_chosen_not_even_at_the_ends(dtype: torch.dtype) -> None:
    head = token_head(9, dtype)
    impossible = [0, 1, 4, 7, 8]
    with torch.no_grad():
        head.bias[impossible] = -torch.inf
    numbers = [0.0, 2.0**-53, *(uniform(0, 0, 0, 0, position) for position in range(500)), LARGEST_UNIFORM]
    hidden = torch.randn(1, HIDDEN).to(dtype).expand(len(numbers), -1)
    found = chosen(head, hidden, numbers)
    assert (found[0], found[-1]) == (2, 6)
    assert set(found) == {2, 3, 5, 6}


@given(scale=st.floats(1e-3, 1e3), temperature=st.sampled_from([0.01, 1.0, 100.0]))
def test_the_largest_number_below_one_chooses_a_possible_token(scale: float, temperature: float) -> None:
    head, hidden = token_head(50), torch.randn(8, HIDDEN, dtype=torch.float64) * scale
    found = chosen(head, hidden, [LARGEST_UNIFORM] * 8, temperature=temperature)
    probabilities = torch.softmax(head(hidden) / temperature, -1)
    assert all(probabilities[row, token] > 0 for row, token in enumerate(found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("greedy", [False, True])
def test_logprobs_of_chosen_tokens_have_the_bits_of_their_scores(greedy: bool, dtype: torch.dtype) -> None:
    head, hidden = token_head(30, dtype), torch.randn(7, HIDDEN).to(dtype)
    numbers = torch.linspace(0, 0.99, 7, dtype=torch.float64)
    ids, logps = heads.sample_rows(head, hidden, numbers, temperature=0.6, greedy=greedy, block_rows=3)
    scored, _ = heads.score_rows(head, hidden, ids, temperature=0.6, block_rows=3)
    assert torch.equal(logps, scored)


def test_greedy_takes_the_first_of_the_largest_logits_even_where_a_temperature_would_make_others_equal() -> None:
    head = token_head(5)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, 1.5 + 2.0**-52, 1.5 + 2.0**-51, 1.5 + 2.0**-51, 0.5], dtype=torch.float64))
    logits = head.bias / 1.5
    assert logits[1] == logits[2]
    assert chosen(head, torch.zeros(2, HIDDEN, dtype=torch.float64), [0.0, 0.9], greedy=True, temperature=1.5) == [2, 2]


@pytest.mark.parametrize("greedy", [False, True])
def test_a_block_of_rows_is_gone_before_the_next_begins(greedy: bool) -> None:
    head, peaks = token_head(4000, torch.bfloat16), []
    for rows in (4, 40):
        hidden, numbers = torch.randn(rows, HIDDEN).bfloat16(), torch.rand(rows, dtype=torch.float64)
        with LiveBytes() as meter:
            meter.adopt([*head.parameters(), hidden, numbers])
            entry = meter.live[DEVICE]
            heads.sample_rows(head, hidden, numbers, temperature=0.5, greedy=greedy, block_rows=4)
            peaks.append(meter.peak[DEVICE] - entry)
    assert peaks[1] - peaks[0] < 0.1 * peaks[0]


# Options and sizes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_response_tokens": 0}, "max_response_tokens=0 must be"),
        ({"max_response_tokens": 2**31}, "that fits 31 bits"),
        ({"temperature": 0.0}, "for greedy set greedy=True"),
        ({"temperature": math.inf}, "temperature=inf must be a positive number"),
        ({"temperature": math.nan}, "temperature=nan must be a positive number"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": 2**63}, "that fits 63 bits"),
        ({"stop_token_ids": (3, -1)}, r"stop_token_ids=\(3, -1\) must be token ids"),
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingOptions(**{"max_response_tokens": 4, **changes})  # type: ignore[arg-type]


def test_a_rollout_has_room_for_every_response_at_its_longest() -> None:
    value = rollout_value("rollout", 3, SamplingOptions(max_response_tokens=5), "bfloat16")
    assert {name: (spec.shape, spec.dtype) for name, spec in value.tensors.items()} == {
        "token_ids": ((3, 5), "int64"),
        "lengths": ((3,), "int64"),
        "logprobs": ((3, 5), "float32"),
    }


def test_a_decode_costs_what_its_steps_cost_one_by_one() -> None:
    sizes = Geometry(layers=3, hidden=8, heads=4, kv_heads=2, head_dim=2, vocab=11, layer_parameters=1000, item_bytes=2)
    whole = sizes.decode_cost(branches=5, steps=7, prefix_tokens=90, pages=3)
    attended = sum(5 * (90 + own) for own in range(1, 8))
    assert whole.flops == 2 * 35 * (1000 + 88)
    assert whole.attention_flops == 4 * attended * 4 * 2 * 3
    cached = sum(90 + 5 * own for own in range(1, 8)) * 2 * 2 * 2 * 3
    assert whole.weight_bytes == 2 * 7 * (1000 + 88)
    assert whole.moved_bytes > 2 * cached  # besides: activations and partial results
    twice = sizes.decode_cost(branches=5, steps=7, prefix_tokens=180, pages=6)
    assert twice.attention_flops - whole.attention_flops == 4 * 35 * 90 * 4 * 2 * 3
    assert twice.moved_bytes - whole.moved_bytes >= 2 * 7 * 90 * 2 * 2 * 2 * 3


# Tails

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 3


@given(branches=st.integers(1, 6), leaving=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5))
def test_a_tail_gives_every_branch_its_own_tokens_whoever_has_left(branches: int, leaving: list[list[int]]) -> None:
    tail = Tail(
        rows={layer: layer for layer in range(LAYERS)},
        branches=branches,
        heads=KV_HEADS,
        tokens=len(leaving),
        head_dim=HEAD_DIM,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    rows, tokens = list(range(branches)), torch.randn(len(leaving), LAYERS, 2, branches, KV_HEADS, 1, HEAD_DIM)
    for step, picked in enumerate(leaving):
        for layer in range(LAYERS):
            own = tokens[step, layer][:, rows].double()
            keys, values = tail.append(layer, own[0], own[1])
            expected = torch.cat(list(tokens[: step + 1, layer]), -2)[:, rows].double()
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
        tail.advance()
        for row in sorted({pick for pick in picked if pick < len(rows)}, reverse=True):
            tail.leave(row)
            rows[row] = rows[-1]
            rows.pop()
        assert tail.branches == len(rows)
        if not rows:
            break


# Attention of a decode step


class Layer(nn.Module):
    layer_idx = 0


class Pages:
    """A prefix of pages held in a list."""

    def __init__(self, pages: list[torch.Tensor]) -> None:
        self.pages, self.token_counts = pages, tuple(page.shape[2] for page in pages)

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self.pages[index]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        raise AssertionError("nothing is differentiated here")


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("own", [1, 2, 9])
@pytest.mark.parametrize("pages", [[], [4], [4, 4, 1]], ids=str)
def test_one_query_sees_all_its_own_keys_and_the_whole_prefix(pages: list[int], own: int, branches: int) -> None:
    torch.manual_seed(own)
    query = torch.randn(branches, 2 * KV_HEADS, 1, 8, dtype=torch.float64)
    key, value = torch.randn(2, branches, KV_HEADS, own, 8, dtype=torch.float64)
    prefix = torch.randn(2, KV_HEADS, sum(pages), 8, dtype=torch.float64)
    found, _ = paged_attention(Layer(), query, key, value, None, prefix=Pages(list(prefix.split(pages, 2))))
    keys, values = (
        torch.cat([page.expand(branches, -1, -1, -1), mine], 2).repeat_interleave(2, 1)
        for page, mine in zip(prefix, (key, value), strict=True)
    )
    expected = (query @ keys.transpose(-1, -2) * 8**-0.5).softmax(-1) @ values
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-13)


def test_several_queries_with_other_own_keys_than_theirs_are_refused() -> None:
    query, key = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(UnsupportedModelError, match="Layer attends with 3 queries to 5 own keys"):
        paged_attention(Layer(), query, key, key, None)
