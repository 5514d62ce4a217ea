"""What CUDA kernels take inside is known from shapes alone, and joins the peak of a trace beside what is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.device_kind import CPU, CUDA_BLOCK_BYTES, DeviceKind, cuda_kind
from engine.memory import DEVICE, HOST, LiveBytes
from models.attention import EmptyPrefix, paged_attention
from models.policy import find_policy
from models.workspaces import KERNEL_WORKSPACES, most_splits, num_splits, reduction_bytes, workspaces
from stages.estimate import Estimator
from stages.settings import GrpoSettings
from tests.helpers import random_group, step_space, tiny_config
from tests.unit.test_attention import Layer

aten = torch.ops.aten
H100 = cuda_kind(132)
FLASH, FLASH_BACKWARD = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def laid_out(*shape: int) -> torch.Tensor:
    """Return ``[B, H, S, D]`` whose memory is ``[B, S, H, D]``."""
    batch, heads, tokens, dim = shape
    return empty(batch, tokens, heads, dim).transpose(1, 2)


def inside(op: Any, *args: Any, kind: DeviceKind = H100, **kwargs: Any) -> int:
    return KERNEL_WORKSPACES[op](args, kwargs, kind)


def test_nothing_is_taken_on_a_cpu() -> None:
    assert workspaces(CPU) == {}
    assert workspaces(H100) is KERNEL_WORKSPACES


# Flash attention


def test_a_chunk_that_fills_the_device_is_not_split() -> None:
    # 32 heads * 64 blocks of 64 queries = 2,048 blocks, far above 0.8 * 2 * 132 = 211.2
    assert inside(FLASH, laid_out(1, 32, 4096, 128), empty(1, 8, 4096, 128), empty(1, 8, 4096, 128)) == 0


def test_few_queries_split_the_keys_and_the_most_parts_are_counted() -> None:
    # 8 heads * 1 block = 8 blocks of 264 places. With 32 blocks of keys 32 parts fill 256 places, which is the best; 16
    # fill half as many, and from 17 to 31 the longest part is as long as with 16: they are no choice. With more blocks
    # of keys 33 parts may be a choice, and none of more.
    assert num_splits(8, 132, 32) == 32
    assert most_splits(8, 132) == 33
    partial_lse, partial_out = 33 * 8 * 16 * 4, 33 * 8 * 16 * 128 * 4
    for keys in (16, 4096):
        page = empty(1, 8, keys, 128)
        assert inside(FLASH, laid_out(1, 8, 16, 128), page, page) == partial_lse + partial_out


def test_one_query_of_grouped_heads_is_many_queries_of_few() -> None:
    query, page = empty(1, 32, 1, 64), empty(1, 8, 1024, 64)  # 32 heads over 8: 4 queries of 8 heads, a block each
    assert inside(FLASH, query, page, page) == H100.rounded(33 * 8 * 4 * 4) + 33 * 8 * 4 * 64 * 4
    spread = empty(1, 32, 1, 128)[..., ::2]
    assert inside(FLASH, spread, page, page) == inside(FLASH, query, page, page) + 32 * 64 * 2


@pytest.mark.parametrize("blocks", [1, 3, 8, 50, 132, 211])
def test_splits_are_what_the_search_of_the_source_finds(blocks: int) -> None:
    for key_blocks in (1, 2, 7, 16, 33, 100, 128, 500):
        assert num_splits(blocks, 132, key_blocks) == searched_splits(blocks, 264, key_blocks)


def searched_splits(blocks: int, places: int, key_blocks: int) -> int:
    """Return what num_splits_heuristic says, step by step."""
    shares: list[tuple[int, float]] = []
    for parts in range(1, min(128, places, key_blocks) + 1):
        if parts == 1 or -(-key_blocks // parts) != -(-key_blocks // (parts - 1)):
            shares.append((parts, (blocks * parts / places) / -(-blocks * parts // places)))
    best = max(share for _, share in shares)
    return next(parts for parts, share in shares if share >= 0.85 * best)


@pytest.mark.parametrize(("blocks", "key_blocks", "expected"), [(212, 64, 1), (211, 64, 5), (1, 1, 1), (132, 64, 2)])
def test_splits_are_as_few_as_give_85_percent_of_the_best_occupancy(
    blocks: int, key_blocks: int, expected: int
) -> None:
    assert num_splits(blocks, 132, key_blocks) == expected


def test_the_backward_has_an_accumulator_for_each_share_of_the_device() -> None:
    query, page = laid_out(1, 32, 4000, 128), empty(1, 8, 1024, 128)
    lse = empty(1, 32, 4000, dtype=torch.float32)
    parts, rows = 5, 4096  # 132 multiprocessors over 32 heads; queries in blocks of 128
    row_sums = 32 * rows * 4
    accumulator = parts * rows * 32 * 128 * 4
    by_query_head = 2 * 1024 * 32 * 128 * 2
    expected = row_sums + accumulator + by_query_head
    assert inside(FLASH_BACKWARD, query, query, page, page, query, lse) == expected
    contiguous = empty(1, 32, 4000, 128)  # not as the kernel reads it: gradient and output are copied
    copies = 2 * 32 * 4000 * 128 * 2
    assert inside(FLASH_BACKWARD, contiguous, query, page, page, contiguous, lse) == expected + copies


def test_the_backward_of_as_many_key_heads_sums_nothing_over_groups() -> None:
    query = laid_out(2, 4, 100, 72)
    lse = empty(2, 4, 100, dtype=torch.float32)
    parts, rows, dim = 17, 128, 96  # 132 over 8; dimensions in steps of 32
    assert inside(FLASH_BACKWARD, query, query, query, query, query, lse) == (
        2 * 4 * rows * 4 + parts * 2 * rows * 4 * dim * 4
    )


# Sorting and scattering


def test_a_short_sort_has_a_range_and_a_long_one_a_second_buffer() -> None:
    assert inside(aten.sort.stable, empty(4096, dtype=torch.int64), stable=True) == 4096 * 8
    count = 100_000
    passes, tiles = 8, 98
    temporary = passes * 1024 + tiles * 1024 + 2 * 800_000 + 256
    found = inside(aten.sort.stable, empty(count, dtype=torch.int64), stable=True)
    assert found == H100.rounded(count * 8) + H100.rounded(temporary)


def test_rows_are_added_through_a_scaled_copy_and_sorted_indices() -> None:
    target, rows = empty(32_000, 64, dtype=torch.float32), empty(512, 64, dtype=torch.float32)
    ids = empty(512, dtype=torch.int64)
    passes = 2  # 32,000 rows: 15 bits
    temporary = passes * 1024 + 1024 + 2 * 512 * 8 + 256
    expected = 512 * 64 * 4 + 4 * 512 * 8 + H100.rounded(temporary)
    assert inside(aten.index_add_.default, target, 0, ids, rows) == expected
    assert inside(aten.index_copy_.default, target, 0, ids, rows) == expected - 512 * 64 * 4


def test_numbers_are_scattered_through_coordinates() -> None:
    logits, targets = empty(64, 1000, dtype=torch.float32), empty(64, 1, dtype=torch.int64)
    temporary = 2 * 1024 + 1024 + 2 * 512 + 256  # 64,000 numbers: 16 bits
    expected = 64 * 8 + 4 * 512 + H100.rounded(temporary)
    assert inside(aten.scatter_add_.default, logits, 1, targets, empty(64, 1, dtype=torch.float32)) == expected


# Reductions


def test_a_row_a_thread_block_needs_no_global_memory() -> None:
    assert reduction_bytes(empty(4096, 4096, dtype=torch.float32), [-1], 4, H100) == 0


def test_a_norm_of_all_goes_through_global_memory() -> None:
    # 2**24 numbers by vectors of 4: blocks of 512 threads, 32,768 numbers a thread; 4 blocks a multiprocessor are 528
    # at first, of which the 32,768 / 16 = 2,048 that work allows are more and 32,768 / 256 = 128 fewer.
    x = empty(2**24, dtype=torch.float32)
    assert reduction_bytes(x, [], 4, H100) == H100.rounded(528 * 4) + 512
    assert inside(aten.linalg_vector_norm.default, x) == H100.rounded(528 * 4) + 512


def test_a_sum_over_rows_is_shared_by_blocks() -> None:
    # 4,096 columns by vectors of 4 are 1,024; blocks of 128 threads: 32 wide, 4 high. 4,096 rows / 4 = 1,024 a thread.
    # 32 columns of blocks; 16 blocks of 128 threads a multiprocessor: 2,112 / 32 = 66, and 1,024 / 16 = 64.
    x = empty(4096, 4096, dtype=torch.float32)
    assert inside(aten.sum.dim_IntList, x, [0]) == 4 * 4096 * 64 * 32 * 4 + 512
    assert inside(aten.sum.dim_IntList, x.t(), [1]) == inside(aten.sum.dim_IntList, x, [0])


def test_an_empty_sum_takes_nothing() -> None:
    assert reduction_bytes(empty(0, 4), [0], 4, H100) == 0
    assert reduction_bytes(empty(1, 1), [0, 1], 4, H100) == 0


def test_a_log_sum_exp_has_the_exponentials_of_all() -> None:
    assert inside(aten.logsumexp.default, empty(16, 1024, dtype=torch.float32), [-1]) == 16 * 1024 * 4 + 512


def test_a_running_sum_of_one_row_has_sums_of_blocks() -> None:
    assert inside(aten.cumsum_.default, empty(1, 50_000, dtype=torch.float64), -1) == 512  # 13 numbers
    assert inside(aten.cumsum_.default, empty(2, 50_000, dtype=torch.float64), -1) == 0


# Traces


def test_storages_are_rounded_as_the_allocator_does_and_those_of_the_host_are_not() -> None:
    with LiveBytes(kind=H100) as meter:
        x = torch.empty(3, device="meta")
        assert meter.live[DEVICE] == CUDA_BLOCK_BYTES
        x.resize_(129)
        assert meter.live[DEVICE] == 2 * CUDA_BLOCK_BYTES
        with meter.on_host():
            y = torch.empty(3, device="meta")
        assert meter.live[HOST] == y.nbytes
        del x, y
        assert meter.live == {DEVICE: 0, HOST: 0}


def test_what_an_operator_takes_inside_raises_the_peak_beside_its_operands_and_results() -> None:
    op = aten.add.Tensor
    with LiveBytes(inside={op: lambda args, kwargs, kind: 1000 + args[0].numel()}) as meter:
        x = torch.empty(10, device="meta")
        y = x + x
        assert meter.live[DEVICE] == x.nbytes + y.nbytes
        assert meter.peak[DEVICE] == x.nbytes + y.nbytes + 1010


@pytest.mark.parametrize("batch", [1, 2])
def test_attention_over_pages_peaks_with_the_accumulators_of_the_device_it_is_planned_for(batch: int) -> None:
    heads, kv_heads, tokens, dim, page_tokens = 4, 2, 200, 64, 512
    query = laid_out(batch, heads, tokens, dim).requires_grad_()
    key = laid_out(batch, kv_heads, tokens, dim).requires_grad_()
    page = empty(2, kv_heads, page_tokens, dim)
    with LiveBytes(kind=H100, inside=KERNEL_WORKSPACES) as meter:
        prefix = SizesOnly(page)
        meter.adopt([query, key, page])
        before = meter.live[DEVICE]
        out = paged_attention(Layer(), query, key, key, None, prefix=prefix, kind=H100)[0]
        d_out = torch.empty_like(out)
        meter.restart_peak()
        out.backward(d_out)
        reached = meter.peak[DEVICE] - before
    of_query, of_key = batch * heads * tokens * dim * 2, batch * kv_heads * tokens * dim * 2
    lse = empty(batch, heads, tokens, dtype=torch.float32)
    # At the page's backward there are: the output, which lies as the layer wants it and as the kernel does, and its
    # gradient; the queries' gradient in float32 and that by this page; those of own keys and values and of the page's.
    live = 2 * of_query + 2 * of_query + of_query + 2 * of_key + page.nbytes
    live += H100.rounded(lse.nbytes) * (1 if batch == 1 else 2)  # kept, and with the branches in the query axis
    folded = laid_out(1, heads, batch * tokens, dim)
    taken = inside(FLASH_BACKWARD, folded, folded, page[0:1], page[1:2], folded, lse)
    assert taken > live
    assert reached == live + taken


class SizesOnly:
    """A prefix of one page whose cotangents go nowhere."""

    def __init__(self, page: torch.Tensor) -> None:
        self._page, self.token_counts = page, (page.shape[2],)

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self._page

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        pass


def test_stages_are_planned_with_what_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GrpoSettings(dtype=torch.bfloat16)
    space = step_space(tiny_config("qwen3"), [random_group(0, 300, (9, 5))], settings)
    plan = space.lower(space.first())
    ours, theirs = Estimator(space.policy, torch.bfloat16), Estimator(space.policy, torch.bfloat16, H100)
    taken: list[int] = []

    def note(args: tuple[Any, ...], kwargs: dict[str, Any], kind: DeviceKind) -> int:
        taken.append(KERNEL_WORKSPACES[FLASH_BACKWARD](args, kwargs, kind))
        return taken[-1]

    monkeypatch.setattr("stages.estimate.workspaces", lambda kind: {FLASH_BACKWARD: note} if kind is H100 else {})
    for kind in ("prefill", "score", "replay", "sweep"):
        stage = next(stage for stage in plan.stages.values() if stage.kind == kind)
        assert ours.workspace_bytes(kind, stage, plan) == stage.workspace_bytes
        taken.clear()
        planned = theirs.workspace_bytes(kind, stage, plan)
        assert planned % CUDA_BLOCK_BYTES == 0
        assert bool(taken) == (kind in ("replay", "sweep"))
        assert planned > max([*taken, stage.workspace_bytes // 2])
    assert theirs.load_workspace_bytes >= ours.load_workspace_bytes


@pytest.mark.parametrize(
    ("kind", "op"),
    [(H100, FLASH), (CPU, aten._scaled_dot_product_flash_attention_for_cpu.default)],
    ids=["cuda", "cpu"],
)
def test_a_model_is_traced_with_the_kernels_of_the_device_it_is_planned_for(kind: DeviceKind, op: Any) -> None:
    model = find_policy(tiny_config("qwen3")).sizes_only(torch.bfloat16, kind)
    hidden = empty(1, 6, model.body.config.hidden_size)
    seen: list[int] = []

    def note(args: tuple[Any, ...], kwargs: dict[str, Any], kind: DeviceKind) -> int:
        seen.append(args[0].shape[2])
        return 0

    with LiveBytes(inside={op: note}):
        model.block_forward(0, hidden, model.positions(hidden, 0), EmptyPrefix())
        for _ in range(2):
            model.accumulate_into({name: torch.empty_like(p) for name, p in model.hf.named_parameters()})
            model.block_backward(0, hidden, model.positions(hidden, 0), EmptyPrefix(), hidden, None)
    assert seen == [6, 6, 6]
