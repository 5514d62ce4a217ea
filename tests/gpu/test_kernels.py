"""On a GPU: fused attention equals what is written out, gives the same bits every time, and takes what was planned.

The expected bytes are those of `models.workspaces`, which was written from PyTorch's sources.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.device_kind import CUBLAS_WORKSPACE_CONFIG, DeviceKind, cuda_kind
from engine.memory import DEVICE, LiveBytes
from models.kernels import CUDA_FLASH, MATH, AttentionKernels, attention_kernels
from models.workspaces import KERNEL_WORKSPACES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
aten = torch.ops.aten

LAYOUTS = {
    "a chunk": (1, 32, 8, 1000, 1000, 128, True),
    "a page": (1, 32, 8, 1000, 1024, 128, False),
    "few queries": (1, 8, 2, 16, 4096, 64, False),
    "one query": (4, 16, 4, 1, 2048, 64, False),
    "as many key heads": (2, 4, 4, 300, 300, 256, True),
}
"""Branches, query heads, key heads, queries, keys, head dimension; causal."""
FULL = ("a chunk", "a page")
"""Those with queries enough to fill any device, so that their keys are not cut."""


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE_CONFIG))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(name="kind")
def _kind() -> DeviceKind:
    return cuda_kind(torch.cuda.get_device_properties(0).multi_processor_count)


def drawn(layout: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries, keys, values and the output's gradient, laid out as autograd has them."""
    batch, heads, kv_heads, queries, keys, dim = layout[:6]
    generator = torch.Generator(device="cuda").manual_seed(sum(layout))
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return [
        torch.randn(batch, tokens, count, dim, device="cuda", generator=generator).to(dtype).transpose(1, 2)
        for tokens, count in sizes
    ]


def both_ways(chosen: AttentionKernels, made: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v, d_out = made
    scale = q.shape[3] ** -0.5
    out, lse = chosen.forward(q, k, v, causal, scale)
    return [out, lse, *chosen.backward(chosen.received(d_out), q, k, v, out, lse, causal, scale)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_fused_attention_is_no_less_exact_than_what_is_written_out(name: str, dtype: torch.dtype) -> None:
    made, causal = drawn(LAYOUTS[name], dtype), bool(LAYOUTS[name][6])
    assert attention_kernels(made[0]) is CUDA_FLASH
    truth = both_ways(MATH, [tensor.double() for tensor in made], causal)
    fused, written = both_ways(CUDA_FLASH, made, causal), both_ways(MATH, made, causal)
    bound = 8 * torch.finfo(dtype).eps
    for ours, theirs, exact in zip(fused, written, truth, strict=True):
        error = float((ours - exact).norm() / exact.norm())
        assert error <= max(3 * float((theirs - exact).norm() / exact.norm()), bound)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_out_is_the_same_on_the_gpu_as_on_the_cpu(name: str) -> None:
    made, causal = drawn(LAYOUTS[name], torch.float64), bool(LAYOUTS[name][6])
    assert attention_kernels(made[0]) is MATH
    here = both_ways(MATH, [tensor.cpu() for tensor in made], causal)
    for ours, theirs in zip(both_ways(MATH, made, causal), here, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-12, atol=1e-12)
    made = [tensor.float() for tensor in made]
    for ours, theirs in zip(both_ways(MATH, made, causal), here, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) <= 1e-5


@pytest.mark.parametrize("chosen", [CUDA_FLASH, MATH], ids=["fused", "written out"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_call_gives_the_same_bits(name: str, chosen: AttentionKernels) -> None:
    made, causal = drawn(LAYOUTS[name], torch.bfloat16), bool(LAYOUTS[name][6])
    first = both_ways(chosen, made, causal)
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, both_ways(chosen, made, causal), strict=True))


@pytest.mark.parametrize("name", ["a page", "few queries"])
def test_a_page_is_differentiated_through_merged_results(name: str) -> None:
    q, k, v, d_out = drawn(LAYOUTS[name], torch.bfloat16)
    out, lse = CUDA_FLASH.forward(q, k, v, False, 0.1)
    half = k.shape[2] // 2
    whole = CUDA_FLASH.backward(d_out, q, k, v, out, lse, False, 0.1)
    parts = [
        CUDA_FLASH.backward(d_out, q, k[:, :, p], v[:, :, p], out, lse, False, 0.1)
        for p in (slice(0, half), slice(half, None))
    ]
    summed = [parts[0][0].float() + parts[1][0].float(), *(torch.cat([part[i] for part in parts], 2) for i in (1, 2))]
    for ours, theirs in zip(summed, whole, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) <= 2e-2


# Bytes


def peaks(run: Callable[..., Any], given: list[torch.Tensor], kind: DeviceKind) -> tuple[int, int]:
    """Return the peaks of a call, planned without data and measured, above what it is given."""
    planned = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
    with LiveBytes(kind=kind, inside=KERNEL_WORKSPACES) as meter:
        meter.adopt(planned)
        entry = meter.live[DEVICE]
        result = run(*planned)
        del result
    run(*given)  # whatever stays for good is there now
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run(*given)
    torch.cuda.synchronize()
    del result
    return meter.peak[DEVICE] - entry, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", LAYOUTS)
def test_flash_attention_takes_the_bytes_planned(name: str, kind: DeviceKind) -> None:
    q, k, v, d_out = drawn(LAYOUTS[name], torch.bfloat16)
    causal = bool(LAYOUTS[name][6])
    planned, measured = peaks(lambda q, k, v: CUDA_FLASH.forward(q, k, v, causal, 0.1), [q, k, v], kind)
    assert measured <= planned  # that of the most parts that any number of keys is cut into
    if name in FULL:
        assert planned == measured
    out, lse = CUDA_FLASH.forward(q, k, v, causal, 0.1)
    given = [q, k, v, out, lse]
    for d_out_as in (d_out, d_out.contiguous()):
        planned, measured = peaks(
            lambda d_out, q, k, v, out, lse: CUDA_FLASH.backward(d_out, q, k, v, out, lse, causal, 0.1),
            [d_out_as, *given],
            kind,
        )
        assert planned == measured


def long_numbers(count: int, below: int) -> torch.Tensor:
    return torch.randint(below, (count,), device="cuda")


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "a norm of all": (torch.linalg.vector_norm, lambda: [torch.ones(2**24, device="cuda")]),
    "sums over rows": (lambda x: x.sum(0), lambda: [torch.ones(4096, 4096, device="cuda")]),
    "sums of rows": (lambda x: x.sum(-1), lambda: [torch.ones(512, 50_000, device="cuda")]),
    "largest of rows": (lambda x: x.amax(-1, keepdim=True), lambda: [torch.ones(64, 150_000, device="cuda")]),
    "places of the largest": (lambda x: x.argmax(-1), lambda: [torch.ones(4, 150_000, device="cuda")]),
    "means of squares": (lambda x: x.mean(-1, keepdim=True), lambda: [torch.ones(1, 2048, 4096, device="cuda")]),
    "log-sum-exp": (lambda x: torch.logsumexp(x, -1), lambda: [torch.ones(64, 50_000, device="cuda")]),
    "a running sum": (
        lambda x: x.cumsum_(-1),
        lambda: [torch.ones(1, 50_000, device="cuda", dtype=torch.float64)],
    ),
    "running sums": (lambda x: x.cumsum_(-1), lambda: [torch.ones(8, 50_000, device="cuda", dtype=torch.float64)]),
    "a short sort": (lambda x: torch.argsort(x, stable=True), lambda: [long_numbers(4096, 32_000)]),
}
"""Operators whose bytes inside are known to the byte."""

BOUNDED: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "a long sort": (lambda x: torch.argsort(x, stable=True), lambda: [long_numbers(200_000, 32_000)]),
    "rows added": (
        lambda into, ids, rows: into.index_add_(0, ids, rows),
        lambda: [
            torch.zeros(32_000, 256, device="cuda"),
            long_numbers(8192, 32_000).sort()[0],
            torch.ones(8192, 256, device="cuda"),
        ],
    ),
    "rows copied": (
        lambda into, ids, rows: into.index_copy_(0, ids, rows),
        lambda: [
            torch.zeros(8192, 256, device="cuda"),
            torch.randperm(8192, device="cuda")[:4096],
            torch.ones(4096, 256, device="cuda"),
        ],
    ),
    "numbers scattered": (
        lambda into, ids, values: into.scatter_add_(1, ids[:, None], values[:, None]),
        lambda: [
            torch.zeros(1024, 50_000, device="cuda"),
            long_numbers(1024, 50_000),
            torch.ones(1024, device="cuda"),
        ],
    ),
}
"""Operators that sort by radix, of which there is a bound."""


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_takes_the_bytes_planned(name: str, kind: DeviceKind) -> None:
    run, make = CALLS[name]
    planned, measured = peaks(run, make(), kind)
    assert planned == measured


@pytest.mark.parametrize("name", BOUNDED)
def test_an_operator_takes_no_more_than_the_bytes_planned(name: str, kind: DeviceKind) -> None:
    run, make = BOUNDED[name]
    planned, measured = peaks(run, make(), kind)
    assert measured <= planned <= 2 * measured
