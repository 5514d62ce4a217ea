"""Recurrent layers evaluated chunk by chunk are the layers evaluated at once: outputs, boundaries, every gradient.

The oracle is Hugging Face's own forward of whole sequences without a cache under dense autograd, in float64. A sweep
goes through the chunks from last to first with nothing but each chunk's incoming boundary, and hands the cotangent of
one boundary to the chunk before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from models.attention import ATTENTION_NAME
from models.dense import DenseModel
from models.float64 import experts_implementation, lifted_casts
from models.gated_delta import (
    Boundary,
    boundary_layout,
    decode_layer,
    is_recurrent,
    layer_backward,
    run_layer,
    run_state,
)
from tests.helpers import HYBRID_FAMILIES, randomise, tiny_hybrid_config

TOLERANCE = 1e-10
HIDDEN = 32
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

Gradients = dict[str, torch.Tensor]
Edges = Sequence[int]
"""Where chunks begin and end: 0, every cut, the number of tokens."""


def build(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return Hugging Face's model, every parameter random."""
    config = tiny_hybrid_config(family, **changes)
    with lifted_casts(dtype):
        hf = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation=experts_implementation(dtype)
        )
    randomise(hf, seed=1)
    return hf.eval()


@cache
def recurrent_layer(family: str, dtype: torch.dtype = torch.float64, width: int = 4) -> Any:
    return build(family, dtype, linear_conv_kernel_dim=width).model.layers[0]


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)


def random_boundary(layer: Any, branches: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Boundary:
    """Return a boundary that is behind random tokens, so of a size that occurs."""
    with torch.no_grad(), lifted_casts(dtype):
        return run_layer(layer, random_tensor(seed, branches, 9, HIDDEN, dtype=dtype), None)[1]


def same(left: Boundary, right: Boundary) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_gradients(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        allowed = TOLERANCE * max(float(gradient.abs().max()), 1e-6 * scale)
        assert float((found[name] - gradient).abs().max()) <= allowed, name


def take_gradients(module: Any) -> Gradients:
    """Return the gradients of all parameters that have one, and clear them."""
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def chunks(edges: Edges) -> list[slice]:
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


@st.composite
def edges_of(draw: st.DrawFn, longest: int = 140) -> list[int]:
    """Any chunks: one token, shorter than the convolution, as long as the rule's own blocks of 64 and longer."""
    tokens = draw(st.integers(1, longest))
    cuts = draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=8)) if tokens > 1 else set()
    if draw(st.booleans()):  # a run of single tokens
        first = draw(st.integers(0, tokens - 1))
        cuts |= set(range(max(1, first), min(tokens, first + 4)))
    return [0, *sorted(cuts), tokens]


def forward(layer: Any, hidden: torch.Tensor, edges: Edges, start: Boundary | None) -> Any:
    """Return outputs of all chunks and the boundary before each of them, and behind the last."""
    boundaries, outs = [start], []
    with torch.no_grad():
        for chunk in chunks(edges):
            out, after = run_layer(layer, hidden[:, chunk], boundaries[-1])
            outs.append(out)
            boundaries.append(after)
    return torch.cat(outs, 1), boundaries


def sweep(
    layer: Any,
    hidden: torch.Tensor,
    edges: Edges,
    boundaries: Sequence[Boundary | None],
    d_out: torch.Tensor,
    d_boundary: Boundary | None,
) -> tuple[torch.Tensor, Boundary | None]:
    """Return the cotangents of the layer's input and of the boundary before the first chunk."""
    parts: list[torch.Tensor] = []
    for index, chunk in reversed([*enumerate(chunks(edges))]):
        d_hidden, d_boundary = layer_backward(layer, hidden[:, chunk], boundaries[index], d_out[:, chunk], d_boundary)
        parts.insert(0, d_hidden)
    return torch.cat(parts, 1), d_boundary


@settings(max_examples=25)
@example(edges=[0, 1100], branches=1, width=4, seed=0)
@example(edges=[0, 1, 700, 1100], branches=2, width=4, seed=0)
@given(edges=edges_of(), branches=st.integers(1, 2), width=st.sampled_from([2, 4]), seed=st.integers(0, 99))
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_layer_in_chunks_is_the_layer_at_once_and_so_is_its_gradient(
    family: str, edges: list[int], branches: int, width: int, seed: int
) -> None:
    layer, tokens = recurrent_layer(family, width=width), edges[-1]
    d_out = random_tensor(seed + 1, branches, tokens, HIDDEN)
    with lifted_casts(torch.float64):
        whole = random_tensor(seed, branches, tokens, HIDDEN).requires_grad_()
        expected = layer(whole, position_embeddings=None)
        expected.backward(d_out)
        of_parameters = take_gradients(layer)

        out, boundaries = forward(layer, whole.detach(), edges, None)
        d_hidden, d_start = sweep(layer, whole.detach(), edges, boundaries, d_out, None)
    assert d_start is None
    assert error(out, expected.detach()) <= TOLERANCE
    assert_gradients(
        {**take_gradients(layer), "hidden": d_hidden},
        {**of_parameters, "hidden": whole.grad},  # type: ignore[dict-item]
    )


@pytest.mark.parametrize("edges", [[0, 1], [0, 2], [0, 1, 2, 3, 4, 9], [0, 64, 65, 130], [0, 600]], ids=str)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_boundary_is_what_hugging_faces_cache_holds_but_for_the_column_that_does_not_matter(
    family: str, edges: list[int]
) -> None:
    hf, tokens = build(family), edges[-1]
    layer = hf.model.layers[0]
    hidden, stock = random_tensor(3, 2, tokens, HIDDEN), DynamicCache(config=hf.config)
    held: Any = stock.layers[0]
    with torch.no_grad(), lifted_casts(torch.float64):
        layer(hidden, position_embeddings=None, cache=stock)
        found = forward(layer, hidden, edges, None)[1][-1]
    assert error(found.conv, held.conv_states[0][..., 1:]) <= TOLERANCE
    assert error(found.recurrent, held.recurrent_states[0]) <= TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 100])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_chunk_gives_the_same_bits_with_autograd_and_without_and_where_only_its_boundary_is_wanted(
    family: str, tokens: int, dtype: torch.dtype
) -> None:
    layer, hidden = recurrent_layer(family, dtype), random_tensor(5, 3, tokens, HIDDEN, dtype=dtype)
    boundary = random_boundary(layer, 3, dtype=dtype)
    leaves = Boundary(*(tensor.clone().requires_grad_() for tensor in boundary))
    with lifted_casts(dtype):
        with torch.no_grad():
            out, after = run_layer(layer, hidden, boundary)
            assert same(run_state(layer, hidden, boundary), after)
        again, after_again = run_layer(layer, hidden.clone().requires_grad_(), leaves)
        assert same(run_state(layer, hidden.clone().requires_grad_(), leaves), after)
    assert again.requires_grad
    assert torch.equal(out, again)
    assert same(after, after_again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 70])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_no_boundary_and_a_boundary_of_zeros_are_bitwise_alike(family: str, tokens: int, dtype: torch.dtype) -> None:
    layer, hidden = recurrent_layer(family, dtype), random_tensor(5, 2, tokens, HIDDEN, dtype=dtype)
    zeros = boundary_layout(tiny_hybrid_config(family), dtype)
    with torch.no_grad(), lifted_casts(dtype):
        out, after = run_layer(layer, hidden, None)
        for branches in (1, 2):
            again, after_again = run_layer(layer, hidden, zeros.zeros(branches, "cpu"))
            assert torch.equal(out, again)
            assert same(after, after_again)


@pytest.mark.parametrize("tokens", [1, 2, 70])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_nothing_that_comes_in_is_written_to(family: str, tokens: int) -> None:
    layer, hidden = recurrent_layer(family), random_tensor(5, 2, tokens, HIDDEN)
    boundary = random_boundary(layer, 2)
    with lifted_casts(torch.float64):
        layer_backward(layer, hidden, boundary, hidden, boundary)
        run_state(layer, hidden, boundary)
        if tokens == 1:
            decode_layer(layer, hidden, boundary)
    layer.zero_grad(set_to_none=True)
    assert [tensor._version for tensor in (hidden, *boundary)] == [0, 0, 0]
    assert "forward" not in vars(layer.linear_attn)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_branches_may_share_one_boundary_whose_cotangent_is_the_sum_of_theirs(family: str, tokens: int) -> None:
    layer, hidden = recurrent_layer(family), random_tensor(5, 3, tokens, HIDDEN)
    one = random_boundary(layer, 1)
    each = Boundary(*(tensor.repeat(3, *[1] * (tensor.dim() - 1)) for tensor in one))
    d_out, d_after = random_tensor(6, 3, tokens, HIDDEN), random_boundary(layer, 3, seed=8)
    with lifted_casts(torch.float64):
        with torch.no_grad():
            assert torch.equal(run_layer(layer, hidden, one)[0], run_layer(layer, hidden, each)[0])
        d_shared = layer_backward(layer, hidden, one, d_out, d_after)
        of_shared = take_gradients(layer)
        d_each = layer_backward(layer, hidden, each, d_out, d_after)
        of_each = take_gradients(layer)
    assert_gradients({**of_shared, "hidden": d_shared.hidden}, {**of_each, "hidden": d_each.hidden})
    assert d_shared.boundary is not None
    assert d_each.boundary is not None
    for found, expected in zip(d_shared.boundary, d_each.boundary, strict=True):
        assert error(found, expected.sum(0, keepdim=True)) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_the_cotangent_of_a_boundary_alone_is_pulled_back_without_what_follows_the_recurrence(
    family: str, tokens: int
) -> None:
    layer, hidden = recurrent_layer(family), random_tensor(5, 2, tokens, HIDDEN)
    before, d_after = random_boundary(layer, 2), random_boundary(layer, 2, seed=8)
    with lifted_casts(torch.float64):
        found = layer_backward(layer, hidden, before, None, d_after)
        of_state = take_gradients(layer)
        expected = layer_backward(layer, hidden, before, torch.zeros_like(hidden), d_after)
        of_all = take_gradients(layer)
    assert found.boundary is not None
    assert expected.boundary is not None
    behind = {name for name in of_all if name.startswith(("mlp.", "post_", "linear_attn.norm", "linear_attn.out"))}
    assert behind
    assert not behind & of_state.keys()
    assert_gradients(
        {**of_state, "hidden": found.hidden, **found.boundary._asdict()},
        {
            **{name: of_all[name] for name in of_state},
            "hidden": expected.hidden,
            **expected.boundary._asdict(),
        },
    )


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_what_pads_a_branch_changes_no_bit_of_its_outputs_nor_of_a_gradient(family: str) -> None:
    layer, lengths, tokens = recurrent_layer(family), (7, 70, 1, 66), 70
    boundary = random_boundary(layer, 1)
    real = torch.arange(tokens)[None, :] < torch.tensor(lengths)[:, None]
    hidden, d_out = random_tensor(5, 4, tokens, HIDDEN), random_tensor(6, 4, tokens, HIDDEN) * real[..., None]
    results = []
    for padding in (0.0, 3.0 * random_tensor(9, 4, tokens, HIDDEN)):
        padded = torch.where(real[..., None], hidden, padding)
        with lifted_casts(torch.float64):
            with torch.no_grad():
                out = run_layer(layer, padded, boundary)[0]
            d_hidden, d_boundary = layer_backward(layer, padded, boundary, d_out, None)
        assert d_boundary is not None
        assert not d_hidden[~real].any()
        results.append((out[real], {**take_gradients(layer), "hidden": d_hidden, **d_boundary._asdict()}))
    (out, gradients), (out_again, gradients_again) = results
    if family == "qwen3_5_text":
        assert torch.equal(out, out_again)
        assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)
    else:  # an expert's matrix product has the padding among its rows, and rounds by their number
        assert error(out, out_again) <= TOLERANCE
        assert_gradients(gradients, gradients_again)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_branches_of_several_chunks_padded_in_their_last_are_swept_from_one_boundary(family: str) -> None:
    """Lengths in chunks of 5: all but a branch's last chunk are full, so a chunk takes only branches that have it."""
    layer, lengths, size = recurrent_layer(family), (13, 11, 15), 5
    shared, tokens = random_boundary(layer, 1), 15
    real = torch.arange(tokens)[None, :] < torch.tensor(lengths)[:, None]
    hidden, d_out = random_tensor(5, 3, tokens, HIDDEN), random_tensor(6, 3, tokens, HIDDEN) * real[..., None]
    edges = list(range(0, tokens + 1, size))
    with lifted_casts(torch.float64):
        leaves = Boundary(*(tensor.clone().requires_grad_() for tensor in shared))
        whole = hidden.clone().requires_grad_()
        for row, length in enumerate(lengths):
            out, _ = run_layer(layer, whole[row : row + 1, :length], leaves)
            out.backward(d_out[row : row + 1, :length])
        expected = {**take_gradients(layer), "hidden": whole.grad, "conv": leaves.conv.grad}
        expected["recurrent"] = leaves.recurrent.grad

        _, boundaries = forward(layer, hidden, edges, shared)
        d_hidden, d_shared = sweep(layer, hidden, edges, boundaries, d_out, None)
    assert d_shared is not None
    found = {**take_gradients(layer), "hidden": d_hidden, **d_shared._asdict()}
    assert_gradients(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, TOLERANCE), (torch.float32, 1e-4)], ids=str)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_tokens_decoded_one_by_one_are_those_of_a_chunk_to_rounding(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    layer, hidden = recurrent_layer(family, dtype), random_tensor(5, 3, 12, HIDDEN, dtype=dtype)
    boundary = random_boundary(layer, 1, dtype=dtype)
    with torch.no_grad(), lifted_casts(dtype):
        expected, after = run_layer(layer, hidden, boundary)
        outs = []
        for token in range(12):
            out, boundary = decode_layer(layer, hidden[:, token : token + 1], boundary)
            outs.append(out)
    assert error(torch.cat(outs, 1), expected) <= tolerance
    assert error(boundary.recurrent, after.recurrent) <= tolerance
    assert error(boundary.conv, after.conv) <= tolerance


# A whole model: recurrent layers by this module, the layer of full attention by the dense adapter's phases.


class Pages:
    """One page a chunk, of every layer with full attention, and their cotangents."""

    def __init__(self) -> None:
        self.state: dict[tuple[int, int], torch.Tensor] = {}
        self.cotangents: dict[tuple[int, int], torch.Tensor] = {}

    def keep(self, layer: int, chunk: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.state[layer, chunk] = torch.cat([key, value])
        self.cotangents[layer, chunk] = torch.zeros_like(self.state[layer, chunk])


class PagesBefore:
    """The pages before a chunk as `models.attention.Prefix`."""

    def __init__(self, pages: Pages, counts: Sequence[int]) -> None:
        self.pages, self.token_counts = pages, counts

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self.pages.state[layer, index]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        self.pages.cotangents[layer, index] += torch.cat([d_key, d_value])


class Walk:
    """A hybrid model, one layer of one chunk at a time."""

    def __init__(self, hf: Any, prompt: torch.Tensor, edges: Edges) -> None:
        hf.config._attn_implementation = ATTENTION_NAME
        self.model, self.prompt, self.slices = DenseModel(hf), prompt, chunks(edges)
        self.layers = hf.model.layers
        self.gradients = {name: torch.zeros_like(parameter) for name, parameter in hf.named_parameters()}
        self.model.accumulate_into(self.gradients)
        self.pages = Pages()
        self.boundaries: list[dict[int, Boundary]] = [{}]
        self.d_boundary: dict[int, Boundary] = {}

    def prefix(self, chunk: int) -> PagesBefore:
        return PagesBefore(self.pages, [part.stop - part.start for part in self.slices[:chunk]])

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, chunk: int, *, prompt: bool) -> list[torch.Tensor]:
        """Return the input of every layer, and the last one's output where it is no prompt."""
        model, hidden = self.model, self.model.embed(ids)
        positions = model.positions(hidden, self.first(chunk))
        inputs, boundaries = [hidden], self.boundaries[chunk]
        after: dict[int, Boundary] = {}
        for index, layer in enumerate(self.layers):
            last = prompt and index == len(self.layers) - 1
            if is_recurrent(layer) and last:
                after[index] = run_state(layer, hidden, boundaries.get(index))
            elif is_recurrent(layer):
                hidden, after[index] = run_layer(layer, hidden, boundaries.get(index))
            elif last:
                self.pages.keep(index, chunk, *model.block_state(index, hidden, positions))
            else:
                hidden, key, value = model.block_forward(index, hidden, positions, self.prefix(chunk))
                if prompt:
                    self.pages.keep(index, chunk, key, value)
            if not last:
                inputs.append(hidden)
        if prompt:
            self.boundaries.append(after)
        return inputs

    def first(self, chunk: int) -> int:
        return self.slices[chunk - 1].stop if chunk else 0

    def backward(
        self, ids: torch.Tensor, chunk: int, inputs: list[torch.Tensor], d_hidden: Any, *, prompt: bool
    ) -> None:
        model, positions = self.model, self.model.positions(inputs[0], self.first(chunk))
        before: dict[int, Boundary] = {}
        for index, layer in reversed([*enumerate(self.layers)]):
            if is_recurrent(layer):
                boundary = self.boundaries[chunk].get(index)
                d_after = self.d_boundary[index] if prompt else None
                d_hidden, d_before = layer_backward(layer, inputs[index], boundary, d_hidden, d_after)
                if d_before is not None:
                    before[index] = d_before
            else:
                d_page = self.pages.cotangents[index, chunk].split(1) if prompt else None
                d_hidden = model.block_backward(
                    index,
                    inputs[index],
                    positions,
                    self.prefix(chunk),
                    d_hidden,
                    d_page,
                )
        model.embed_backward(ids, d_hidden)
        self.take(before, replace=prompt)

    def take(self, found: dict[int, Boundary], *, replace: bool) -> None:
        """A chunk's incoming cotangent replaces its outgoing one; those of waves of branches add up."""
        for index, d_before in found.items():
            old = None if replace else self.d_boundary.get(index)
            self.d_boundary[index] = (
                d_before if old is None else Boundary(*(a + b for a, b in zip(old, d_before, strict=True)))
            )


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return -(torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0] * weights).sum()


@settings(max_examples=8)
@given(
    edges=edges_of(40),
    waves=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=2),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("last", ["linear_attention", "full_attention"])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_hybrid_model_swept_by_chunks_has_the_gradient_of_dense_autograd(
    family: str, last: str, edges: list[int], waves: list[list[int]], seed: int
) -> None:
    hf = build(family, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", last])
    numbers = torch.Generator().manual_seed(seed)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(0, hf.config.vocab_size, (1, count), generator=numbers)

    prompt, opening = ids(edges[-1]), ids(1)
    branches = [[(ids(n), torch.randn(1, n, generator=numbers, dtype=torch.float64)) for n in wave] for wave in waves]
    with lifted_casts(torch.float64):
        for response, weights in (branch for wave in branches for branch in wave):
            whole = torch.cat([prompt, opening, response], 1)
            logits = hf(whole, use_cache=False, logits_to_keep=response.shape[1] + 1).logits[:, :-1]
            weighted_loss(logits, response, weights).backward()
        expected = take_gradients(hf)

        walk = Walk(hf, prompt, edges)
        inputs = [walk.forward(prompt[:, part], chunk, prompt=True) for chunk, part in enumerate(walk.slices)]
        for wave in branches:
            replay(walk, opening, wave)
        for chunk, part in reversed([*enumerate(walk.slices)]):
            walk.backward(prompt[:, part], chunk, inputs[chunk], None, prompt=True)
    assert_gradients({name: walk.gradients[name] for name in expected}, expected)
    assert not any(gradient.any() for name, gradient in walk.gradients.items() if name not in expected)


def replay(walk: Walk, opening: torch.Tensor, wave: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Score a wave of branches, padded to the longest, and pull the loss back to their boundary and pages."""
    tokens, chunk = max(response.shape[1] for response, _ in wave), len(walk.slices)
    ids, targets = (torch.zeros(len(wave), tokens, dtype=torch.int64) for _ in range(2))
    factors = torch.zeros(len(wave), tokens, dtype=torch.float64)
    for row, (response, weights) in enumerate(wave):
        length = response.shape[1]
        ids[row, :length] = torch.cat([opening, response[:, :-1]], 1)[0]
        targets[row, :length], factors[row, :length] = response[0], weights[0]
    inputs = walk.forward(ids, chunk, prompt=False)
    out = inputs.pop().requires_grad_()
    hf: Any = walk.model.hf
    weighted_loss(hf.lm_head(hf.model.norm(out)), targets, factors).backward()
    walk.backward(ids, chunk, inputs, out.grad, prompt=False)
