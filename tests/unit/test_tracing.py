"""A traced model needs the bytes that the real one needs, for any number of pages and layers, and computes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device_kind import CPU, DeviceKind, cuda_kind
from engine.memory import DEVICE, LiveBytes
from models.chunk import backward_chunk, forward_chunk
from models.dense import DenseModel
from models.policy import find_policy
from models.tracing import TracedModel, longest_page
from models.workspaces import workspaces
from tests.helpers import tiny_config

KV_HEADS, HEAD_DIM = 2, 8


class Pages:
    """A prefix whose pages exist beforehand and whose cotangents are dropped."""

    def __init__(self, counts: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
        self.token_counts = counts
        self.pages = [torch.zeros(2, KV_HEADS, count, HEAD_DIM, dtype=dtype, device=device) for count in counts]

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self.pages[index]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        pass


def peak_bytes(
    model: Any,
    counts: tuple[int, ...],
    tokens: int,
    *,
    backward: bool,
    device: str,
    batch: int = 1,
    kind: DeviceKind = CPU,
) -> int:
    """Return the bytes above its entry that one chunk reaches."""
    with torch.device(device):
        prefix, ids = Pages(counts, device, model.dtype), torch.zeros(batch, tokens, dtype=torch.int64)
        meter = LiveBytes(kind=kind, inside=workspaces(kind))
        if isinstance(model, TracedModel):
            model.meter = meter
        with meter:
            meter.adopt([*model.hf.parameters(), *model.hf.buffers(), *gradients_of(model), *prefix.pages, ids])
            entry = meter.live[DEVICE]
            meter.restart_peak()
            run_chunk(model, ids, prefix, backward=backward)
            return int(meter.peak[DEVICE]) - int(entry)


def run_chunk(model: Any, ids: torch.Tensor, prefix: Pages, *, backward: bool) -> None:
    if not backward:
        forward_chunk(model, ids, first_position=3, prefix=prefix, keep_state=None, want_hidden=True)
        return
    shape = (ids.shape[0], KV_HEADS, ids.shape[1], HEAD_DIM)
    backward_chunk(
        model,
        ids,
        first_position=3,
        prefix=prefix,
        state_cotangent=lambda layer: (torch.ones(shape, dtype=model.dtype), torch.ones(shape, dtype=model.dtype)),
        head_backward=torch.ones_like,
    )


def gradients_of(model: Any) -> list[torch.Tensor]:
    return list(getattr(model, "model", model).gradients.values())


def with_gradients(model: Any) -> Any:
    model.accumulate_into({name: torch.zeros_like(p) for name, p in model.hf.named_parameters()})
    return model


@pytest.fixture(scope="module", name="models")
def _models() -> tuple[TracedModel, DenseModel]:
    policy = find_policy(tiny_config("qwen3", num_hidden_layers=4))
    traced = TracedModel(policy.sizes_only(torch.float32))
    return with_gradients(traced), with_gradients(policy.load(torch.float32, seed=0))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("counts", [(), (5,), (5, 5, 5, 5, 5), (7, 5, 5, 5, 3), (2, 2, 2, 6)], ids=str)
def test_a_chunk_needs_what_the_real_one_needs(
    counts: tuple[int, ...], backward: bool, models: tuple[TracedModel, DenseModel]
) -> None:
    traced, real = models
    for batch, tokens in ((1, 6), (3, 4), (1, 1)):
        planned = peak_bytes(traced, counts, tokens, backward=backward, device="meta", batch=batch)
        again = peak_bytes(traced, counts, tokens, backward=backward, device="meta", batch=batch)
        measured = peak_bytes(real, counts, tokens, backward=backward, device="cpu", batch=batch)
        assert planned == again == measured


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_chunk_for_a_gpu_needs_what_it_needs_page_by_page(backward: bool) -> None:
    kind, policy = cuda_kind(132), find_policy(tiny_config("qwen3", num_hidden_layers=3))
    traced = with_gradients(TracedModel(policy.sizes_only(torch.bfloat16, kind)))
    plain = with_gradients(policy.sizes_only(torch.bfloat16, kind))
    for counts in ((), (256,), (8192, 8448), (8448, 8192, 8448), (1024, 1024, 300), (1024, 64)):
        for batch, tokens in ((1, 6), (3, 4), (1, 1)):
            peaks = [
                peak_bytes(model, counts, tokens, backward=backward, device="meta", batch=batch, kind=kind)
                for model in (traced, traced, plain)
            ]
            assert peaks[0] == peaks[1] == peaks[2]


@given(st.lists(st.integers(1, 9), max_size=12))
def test_the_longest_page_stands_for_all(counts: list[int]) -> None:
    assert [counts[index] for index in longest_page(counts)] == ([max(counts)] if counts else [])


def test_a_thousand_pages_are_traced_no_longer_than_two(models: tuple[TracedModel, DenseModel]) -> None:
    traced, _ = models
    few = peak_bytes(traced, (5,) * 2, 6, backward=True, device="meta")
    known = len(traced._phases)
    assert peak_bytes(traced, (5,) * 1000, 6, backward=True, device="meta") == few
    assert len(traced._phases) == known
