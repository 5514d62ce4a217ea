"""Sampled responses: what Hugging Face would generate, with the probabilities that the model gives, however they run.

The plans here are put together by hand: load, one prefill, one stage a wave of responses, and a stage that takes what
was sampled out of the plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.budget import Tier
from engine.context import StageContext
from engine.errors import StageFailedError
from engine.hardware import load_profile
from engine.plan import Plan, Stage, Stream, Value, ValueKind
from engine.planner import Forecast, forecast
from engine.runtime import Outcome, execute
from engine.schedule import device_floor
from engine.tensors import dtype_name
from models.attention import EmptyPrefix
from models.chunk import forward_chunk
from models.float64 import lifted_casts
from models.gated_delta import BoundaryLayout, boundary_layout, recurrent_layers
from models.geometry import Geometry, StateLayout, geometry, state_layout
from models.policy import find_policy
from stages import names
from stages.boundary import ChunkEdges, Edge, StageBoundaries
from stages.estimate import Estimator
from stages.sampling import SampleWork, SamplingOptions, add_rollout, rollout_value
from stages.spans import Span
from stages.state import Column, column_values, make_columns, write_state
from tests.helpers import FAMILIES, VOCABULARY, budget, one_thread, random_ids, save_policy, tiny_config

ROLLOUT = "step0/group0/rollout"
NOTHING = SamplingOptions(max_response_tokens=12)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", name="checkpoints")
def _checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return {
        family: save_policy(folder / family, tiny_config(family, tie_word_embeddings=family == "qwen3"), seed=number)
        for number, family in enumerate(FAMILIES)
    }


@dataclass(kw_only=True)
class Rollouts:
    """A plan that samples one group behind one prompt; ``found`` is filled when it runs."""

    policy: Path
    prompt: Sequence[int]
    options: SamplingOptions
    group_size: int = 4
    waves: Sequence[Sequence[int]] | None = None
    step: int = 0
    group: int = 0
    page_tokens: int = 4
    head_rows: int = 64
    dtype: torch.dtype = torch.float64
    pages_on: Tier = Tier.DEVICE
    poison: bool = False
    dirty: bool = False
    found: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        plan = Plan(name="sampling")
        estimator = estimator_of(self.policy, self.dtype)
        sizes = self._sizes(estimator)
        layout = state_layout(sizes, dtype=self.dtype, page_tokens=self.page_tokens)
        columns = make_columns("prompt", len(self.prompt) - 1, layout, with_cotangents=False)
        self._declare(plan, estimator, layout, columns)
        self._add_load(plan, estimator)
        if columns:
            self._add_prefill(plan, estimator, columns)
        if self.dirty:
            plan.add(Stage(name="spoil", kind="spoil", run=self._spoil, updates=(ROLLOUT,)))
        for wave in self.waves or [range(self.group_size)]:
            add_rollout(plan, self._work(tuple(wave), columns, layout), sizes=sizes, estimator=estimator)
        plan.add(Stage(name="take", kind="take", run=self._take, reads=(ROLLOUT,)))
        return plan

    def _sizes(self, estimator: Estimator) -> Geometry:
        layers = (spec.num_elements for name, spec in estimator.parameters().items() if ".layers." in name)
        return geometry(find_policy(self.policy).config, layer_parameters=sum(layers), dtype=self.dtype)

    def _declare(self, plan: Plan, estimator: Estimator, layout: StateLayout, columns: Sequence[Column]) -> None:
        tensors = {**estimator.parameters(), **estimator.buffers()}
        plan.value(
            Value(name=names.WEIGHTS, tensors=tensors, kind=ValueKind.ORDERED, tiers=(Tier.DEVICE,), provided=True)
        )
        plan.value(rollout_value(ROLLOUT, self.group_size, self.options, dtype_name(self.dtype)))
        for column in columns:
            for value in column_values(column, layout):
                plan.value(replace(value, tiers=(self.pages_on,)))
        if self.edges.after is not None and layout.boundary is not None:
            for value in self.edges.after.values(len(self.span.recurrent), layout.boundary):
                plan.value(replace(value, tiers=(self.pages_on,)))

    @property
    def span(self) -> Span:
        """The whole model."""
        config = find_policy(self.policy).config
        layers, recurrent = int(config.num_hidden_layers), recurrent_layers(config)
        return Span(index=0, layers=range(layers), num_layers=layers, next_index=1, recurrent=recurrent)

    @property
    def _boundary_layout(self) -> BoundaryLayout | None:
        config = find_policy(self.policy).config
        return boundary_layout(config, self.dtype) if recurrent_layers(config) else None

    @property
    def edges(self) -> ChunkEdges:
        """Those of the prompt's one chunk."""
        behind = Edge(name="prompt/edge/1", has_cotangent=False, is_shared=True)
        has_one = bool(self.span.recurrent) and len(self.prompt) > 1
        return ChunkEdges(before=None, after=behind if has_one else None, rows=self.span.recurrent_rows)

    def _add_load(self, plan: Plan, estimator: Estimator) -> None:
        def load(context: StageContext) -> None:
            model = find_policy(self.policy).load(self.dtype, seed=0)
            if self.poison:
                model.head.weight.detach().fill_(torch.nan)
            tensors = [*model.hf.parameters(), *model.hf.buffers()]
            context.provide(names.WEIGHTS, tensors=(tensor.detach() for tensor in tensors), item=model)

        workspace = estimator.load_workspace_bytes
        plan.add(Stage(name="load", kind="load", run=load, writes=(names.WEIGHTS,), workspace_bytes=workspace))

    def _add_prefill(self, plan: Plan, estimator: Estimator, columns: Sequence[Column]) -> None:
        def prefill(context: StageContext) -> None:
            model = context.item(names.WEIGHTS)
            with lifted_casts(model.dtype):
                forward_chunk(
                    model,
                    context.index([list(self.prompt[:-1])]),
                    first_position=0,
                    prefix=EmptyPrefix(),
                    boundaries=StageBoundaries(context, self.edges, self._boundary_layout),
                    keep_state=lambda layer, key, value: write_state(context, columns, rows[layer], 0, key, value),
                    want_hidden=False,
                )

        states, rows = tuple(column.state for column in columns), self.span.attention_rows
        stage = Stage(
            name="prefill",
            kind="prefill",
            run=prefill,
            reads=(names.WEIGHTS,),
            streams=(Stream(values=states, updates=True, buffered=False), *self.edges.forward_streams()),
        )
        plan.add(replace(stage, workspace_bytes=estimator.workspace_bytes(("prefill", len(self.prompt)), stage, plan)))

    def _work(self, responses: tuple[int, ...], columns: Sequence[Column], layout: StateLayout) -> SampleWork:
        return SampleWork(
            name=f"group0/response{responses[0]}-response{responses[-1]}",
            rollout=ROLLOUT,
            opening_id=self.prompt[-1],
            first_position=len(self.prompt) - 1,
            visible=tuple((column, column.tokens) for column in columns),
            responses=responses,
            step=self.step,
            group=self.group,
            options=self.options,
            layout=layout,
            span=self.span,
            head_rows=self.head_rows,
            edge=self.edges.after,
        )

    def _spoil(self, context: StageContext) -> None:
        for tensor in context.tensors(ROLLOUT).values():
            tensor.fill_(7)

    def _take(self, context: StageContext) -> None:
        self.found |= {name: tensor.tolist() for name, tensor in context.tensors(ROLLOUT).items()}

    @property
    def responses(self) -> list[list[int]]:
        return [row[:length] for row, length in zip(self.found["token_ids"], self.found["lengths"], strict=True)]

    @property
    def logprobs(self) -> list[list[float]]:
        return [row[:length] for row, length in zip(self.found["logprobs"], self.found["lengths"], strict=True)]


@cache
def estimator_of(policy: Path, dtype: torch.dtype) -> Estimator:
    return Estimator(find_policy(policy), dtype)


_runs = count()


def run(rollouts: Rollouts, folder: Path) -> tuple[Forecast, Outcome]:
    """Execute within the smallest device budget that works."""
    plan = rollouts.plan()
    planned = forecast(plan, budget(device=device_floor(plan)[0]), load_profile("cpu"))
    return planned, execute(planned, folder / f"run{next(_runs)}")


def sample(rollouts: Rollouts, folder: Path) -> list[list[int]]:
    """Execute and return the responses."""
    run(rollouts, folder)
    return rollouts.responses


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return random_ids(random.Random(seed), tokens)


# The reference: Hugging Face's own model, dense


@cache
def hugging_face(policy: Path) -> Any:
    with lifted_casts(torch.float64):
        return AutoModelForCausalLM.from_pretrained(str(policy), dtype=torch.float64).eval()


@torch.no_grad()
def generated(hf: Any, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """Return what ``generate`` puts greedily behind the prompt."""
    ids = torch.tensor([list(prompt)])
    with lifted_casts(torch.float64):
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@torch.no_grad()
def dense_logprobs(hf: Any, sequences: Sequence[Sequence[int]], temperature: float) -> torch.Tensor:
    """Return log-probabilities ``[N, S, V]`` of what follows each token of sequences of one length."""
    with lifted_casts(torch.float64):
        logits = hf(torch.tensor(sequences), use_cache=False).logits
    return torch.log_softmax(logits / temperature, -1)


# Greedy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("prompt_tokens", "page_tokens"), [(1, 4), (2, 4), (9, 4), (9, 64), (22, 5)])
def test_greedy_decoding_equals_generate(
    family: str, prompt_tokens: int, page_tokens: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    prompt, hf = prompt_of(prompt_tokens), hugging_face(checkpoints[family])
    expected = generated(hf, prompt, 12)
    assert len(set(expected)) > 1
    greedy = Rollouts(
        policy=checkpoints[family],
        prompt=prompt,
        options=replace(NOTHING, greedy=True, temperature=0.7),
        page_tokens=page_tokens,
        group_size=2,
    )
    assert sample(greedy, tmp_path) == [expected] * 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [0, 3, 11])
def test_greedy_decoding_stops_where_generate_stops(
    family: str, place: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    prompt, hf = prompt_of(7), hugging_face(checkpoints[family])
    free = generated(hf, prompt, 12)
    stop = (free[place], (free[place] + 1) % VOCABULARY)
    expected = generated(hf, prompt, 12, stop)
    assert expected == free[: len(expected)]
    assert expected[-1] in stop
    greedy = replace(NOTHING, greedy=True, stop_token_ids=stop)
    rollouts = Rollouts(policy=checkpoints[family], prompt=prompt, options=greedy, group_size=1)
    assert sample(rollouts, tmp_path) == [expected]


# The distribution


@pytest.fixture(scope="module", name="small")
def _small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy whose vocabulary has seven tokens."""
    return save_policy(tmp_path_factory.mktemp("small") / "policy", tiny_config("llama", vocab_size=7), seed=5)


PROMPT = [3, 1, 4, 1, 5]
SAMPLES = 3000
PLAUSIBLE = 1e-4
# What a right sampler falls below once in ten thousand tests; there are eighteen, and none was picked.


def pair_probabilities(policy: Path, temperature: float) -> torch.Tensor:
    """Return the exact probability of every pair of first tokens, ``[V, V]``."""
    hf = hugging_face(policy)
    table = dense_logprobs(hf, [[*PROMPT, first] for first in range(7)], temperature)
    return (table[0, -2, :, None] + table[:, -1]).exp()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return how likely counts at least as far from their expectation are; cells that expect below 5 are one cell."""
    expected = counts.sum() * probabilities.double()
    rare = expected < 5
    cells = [(counts[~rare].double(), expected[~rare])]
    if rare.any():
        cells.append((counts[rare].double().sum()[None], expected[rare].sum()[None]))
    statistic = sum(((found - wanted) ** 2 / wanted).sum() for found, wanted in cells)
    degrees = sum(len(wanted) for _, wanted in cells) - 1
    return float(torch.special.gammaincc(torch.tensor(degrees / 2), torch.as_tensor(statistic) / 2))


def pairs(policy: Path, temperature: float, seed: int, folder: Path) -> torch.Tensor:
    """Return how often every pair of first tokens was sampled, ``[V, V]``."""
    options = SamplingOptions(max_response_tokens=2, temperature=temperature, seed=seed)
    rollouts = Rollouts(policy=policy, prompt=PROMPT, options=options, group_size=SAMPLES, head_rows=512)
    drawn = torch.tensor(sample(rollouts, folder))
    return torch.bincount(drawn[:, 0] * 7 + drawn[:, 1], minlength=49).view(7, 7)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_models_distribution_at_the_temperature(
    temperature: float, seed: int, small: Path, tmp_path: Path
) -> None:
    counts, probabilities = pairs(small, temperature, seed, tmp_path), pair_probabilities(small, temperature)
    assert p_value(counts.sum(1), probabilities.sum(1)) > PLAUSIBLE
    assert p_value(counts.flatten(), probabilities.flatten()) > PLAUSIBLE


@pytest.mark.parametrize("wrong", [0.85, 1.2])
def test_the_statistic_notices_a_temperature_that_is_a_fifth_off(wrong: float, small: Path, tmp_path: Path) -> None:
    counts = pairs(small, 1.0, 0, tmp_path)
    assert p_value(counts.flatten(), pair_probabilities(small, wrong).flatten()) < PLAUSIBLE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.8])
def test_reported_logprobs_are_those_of_the_dense_model(
    family: str, temperature: float, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    prompt = prompt_of(10)
    options = replace(NOTHING, temperature=temperature, seed=7)
    rollouts = Rollouts(policy=checkpoints[family], prompt=prompt, options=options, head_rows=3)
    drawn = torch.tensor(sample(rollouts, tmp_path))
    assert len(set(map(tuple, drawn.tolist()))) == len(drawn)
    table = dense_logprobs(hugging_face(checkpoints[family]), [[*prompt, *row] for row in drawn.tolist()], temperature)
    expected = table[:, len(prompt) - 1 : -1].gather(2, drawn[..., None]).squeeze(2)
    torch.testing.assert_close(torch.tensor(rollouts.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-10)


# What decides the tokens, and what does not


@pytest.fixture(scope="module", name="usual")
def _usual(checkpoints: dict[str, Path]) -> Rollouts:
    options = replace(NOTHING, max_response_tokens=14, seed=3, stop_token_ids=(4, 8, 15, 16, 23, 42))
    return Rollouts(policy=checkpoints["llama"], prompt=prompt_of(19), options=options, group_size=6)


@pytest.fixture(scope="module", name="drawn")
def _drawn(usual: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    rollouts = again(usual)
    run(rollouts, tmp_path_factory.mktemp("usual"))
    return rollouts


def again(rollouts: Rollouts, **changes: Any) -> Rollouts:
    return replace(rollouts, found={}, **changes)


def test_responses_end_at_different_lengths_here(drawn: Rollouts) -> None:
    """Or the tests below would say less than they seem to."""
    lengths = drawn.found["lengths"]
    assert len(set(lengths)) > 3
    assert max(lengths) == 14
    assert all(row[-1] in drawn.options.stop_token_ids for row in drawn.responses if len(row) < 14)


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_the_tier_of_the_prompts_pages_changes_no_bit_of_tokens_and_logprobs(
    tier: Tier, usual: Rollouts, drawn: Rollouts, tmp_path: Path
) -> None:
    moved = again(usual, pages_on=tier)
    planned, _ = run(moved, tmp_path)
    assert planned.moved_bytes[f"{tier}->device"] >= sum(
        value.nbytes for name, value in planned.plan.values.items() if name.startswith("prompt/state")
    )
    assert moved.found == drawn.found


@pytest.mark.parametrize(
    "waves",
    [[[i] for i in range(6)], [[0, 1], [2, 3], [4, 5]], [[5, 4, 3, 2, 1, 0]], [[4], [5, 1, 3], [2, 0]]],
    ids=["one by one", "in twos", "backwards", "mixed"],
)
def test_waves_and_the_order_of_responses_do_not_change_tokens(
    waves: list[list[int]], usual: Rollouts, drawn: Rollouts, tmp_path: Path
) -> None:
    other = again(usual, waves=waves)
    assert sample(other, tmp_path) == drawn.responses
    for ours, theirs in zip(other.logprobs, drawn.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(
    "changes", [{"page_tokens": 7}, {"page_tokens": 64}, {"head_rows": 1}, {"head_rows": 4}], ids=str
)
def test_pages_and_row_blocks_do_not_change_tokens(
    changes: dict[str, int], usual: Rollouts, drawn: Rollouts, tmp_path: Path
) -> None:
    assert sample(again(usual, **changes), tmp_path) == drawn.responses


def test_the_same_plan_draws_the_same_bits_again(usual: Rollouts, drawn: Rollouts, tmp_path: Path) -> None:
    second = again(usual)
    run(second, tmp_path)
    assert second.found == drawn.found


@pytest.mark.parametrize("changes", [{"step": 1}, {"group": 1}, {"seed": 4}], ids=str)
def test_another_seed_step_or_group_draws_other_tokens_for_every_response(
    changes: dict[str, int], usual: Rollouts, drawn: Rollouts, tmp_path: Path
) -> None:
    options = replace(usual.options, seed=changes.pop("seed", usual.options.seed))
    other = sample(again(usual, options=options, **changes), tmp_path)
    assert all(ours != theirs for ours, theirs in zip(other, drawn.responses, strict=True))


def test_responses_of_one_group_differ_from_each_other(drawn: Rollouts) -> None:
    assert len(set(map(tuple, drawn.responses))) == len(drawn.responses)


# Responses that end early


def test_a_response_that_ends_leaves_the_others_as_they_are_and_zeros_behind_its_own_end(
    usual: Rollouts, drawn: Rollouts, tmp_path: Path
) -> None:
    endless = again(usual, options=replace(usual.options, stop_token_ids=()))
    for free, found, length in zip(
        sample(endless, tmp_path), drawn.found["token_ids"], drawn.found["lengths"], strict=True
    ):
        ends = [place for place, token in enumerate(free) if token in usual.options.stop_token_ids]
        assert length == (ends[0] + 1 if ends else 14)
        assert found == free[:length] + [0] * (14 - length)
    for row, length in zip(drawn.found["logprobs"], drawn.found["lengths"], strict=True):
        assert all(value < 0 for value in row[:length])
        assert row[length:] == [0.0] * (14 - length)


def test_what_was_in_a_rollout_before_decides_nothing(usual: Rollouts, drawn: Rollouts, tmp_path: Path) -> None:
    spoiled = again(usual, dirty=True)
    run(spoiled, tmp_path)
    assert spoiled.found == drawn.found


def test_a_token_stops_a_response_at_its_first_place_and_a_group_may_end_at_once(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    options = replace(NOTHING, stop_token_ids=tuple(range(VOCABULARY)))
    rollouts = Rollouts(policy=checkpoints["llama"], prompt=prompt_of(5), options=options)
    assert [len(row) for row in sample(rollouts, tmp_path)] == [1] * 4


def test_logits_that_are_no_numbers_stop_the_run(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    rollouts = Rollouts(policy=checkpoints["llama"], prompt=prompt_of(5), options=NOTHING, poison=True)
    with pytest.raises(StageFailedError, match=r"response 0 of rollout group0/.* logits for token 0 are not finite"):
        run(rollouts, tmp_path)


# Bytes


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize(
    ("shape", "prompt_tokens", "dtype"),
    [
        ((5, 30, 64), 20, torch.float32),
        ((5, 30, 2), 20, torch.bfloat16),
        ((1, 9, 1), 6, torch.bfloat16),
        ((7, 3, 2), 1, torch.float64),
        ((2, 1, 5), 40, torch.float64),
    ],
    ids=str,
)
def test_measured_bytes_equal_planned_bytes_at_full_length(
    shape: tuple[int, int, int],
    prompt_tokens: int,
    dtype: torch.dtype,
    tier: Tier,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    group_size, tokens, head_rows = shape
    rollouts = Rollouts(
        policy=checkpoints["qwen3"],
        prompt=prompt_of(prompt_tokens),
        options=SamplingOptions(max_response_tokens=tokens, temperature=0.8, seed=1),
        group_size=group_size,
        head_rows=head_rows,
        page_tokens=8,
        dtype=dtype,
        pages_on=tier,
        waves=[range(0, (group_size + 1) // 2), range((group_size + 1) // 2, group_size)][: min(group_size, 2)],
    )
    _, outcome = run(rollouts, tmp_path)
    peaks = {name: pair for name, pair in outcome.stage_peak_bytes.items() if name.startswith("rollout")}
    assert len(peaks) == min(group_size, 2)
    assert {name: pair for name, pair in peaks.items() if pair[0] != pair[1]} == {}


def test_responses_that_end_early_need_no_more_than_planned(drawn: Rollouts, usual: Rollouts, tmp_path: Path) -> None:
    _, outcome = run(again(usual), tmp_path)
    (planned, measured), *_ = [p for name, p in outcome.stage_peak_bytes.items() if name.startswith("rollout")]
    assert measured <= planned
