"""LiveBytes: every storage counts once, from its first tensor to its last."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.memory import (
    DEVICE,
    HOST,
    LiveBytes,
    keep_freed_memory,
    peak_rss_bytes,
    return_freed_memory,
    rss_bytes,
)
from engine.units import MIB


def test_a_tensor_counts_from_its_birth_to_its_death() -> None:
    with LiveBytes() as meter:
        first = torch.zeros(100)
        second = torch.zeros(50, dtype=torch.float64)
        assert meter.live[DEVICE] == 800
        del first
        assert meter.live[DEVICE] == 400
        del second
    assert meter.live == {DEVICE: 0, HOST: 0}
    assert meter.peak == {DEVICE: 800, HOST: 0}


def test_views_share_one_storage_and_any_of_them_keeps_it_alive() -> None:
    with LiveBytes() as meter:
        base = torch.zeros(10, 10)
        view = base[2:4].t().reshape(-1)[:3].view(3)
        inside = base.view(-1)[5:]
        assert meter.live[DEVICE] == 400 + view.untyped_storage().nbytes()
        del view, base
        assert meter.live[DEVICE] == 400
        del inside
        assert meter.live[DEVICE] == 0


def test_an_operation_in_place_adds_nothing_and_one_that_returns_several_counts_each() -> None:
    with LiveBytes() as meter:
        tensor = torch.zeros(8)
        tensor.add_(1).mul_(2)
        assert meter.live[DEVICE] == 32
        values, indices = tensor.max(dim=0, keepdim=True)
        assert meter.live[DEVICE] == 32 + values.nbytes + indices.nbytes
        parts = torch._foreach_add([tensor, tensor], 1)
        assert meter.live[DEVICE] == 32 + 12 + 2 * 32
        del parts


def test_what_dies_inside_an_expression_was_in_the_peak() -> None:
    with LiveBytes() as meter:
        tensor = torch.zeros(100)
        (tensor + 1).sum()
    assert meter.peak[DEVICE] == 400 + 400 + 4


def test_storages_that_first_appear_inside_on_host_belong_to_the_host() -> None:
    with LiveBytes() as meter:
        with meter.on_host():
            there = torch.zeros(25)
        here = torch.zeros(50)
        here[:25].copy_(there)
        view = there[:5]
        assert meter.live == {DEVICE: 200, HOST: 100}
        del there
        assert meter.live[HOST] == 100
        del view
        assert meter.live == {DEVICE: 200, HOST: 0}


def test_on_host_ends_with_its_block_even_when_that_raises() -> None:
    with LiveBytes() as meter:
        try:
            with meter.on_host():
                raise RuntimeError
        except RuntimeError:
            pass
        tensor = torch.zeros(4)
        assert meter.live == {DEVICE: tensor.nbytes, HOST: 0}


def test_tensors_from_before_the_mode_count_once_adopted_and_only_once() -> None:
    tensor = torch.zeros(100)
    with LiveBytes() as meter:
        assert meter.live[DEVICE] == 0
        meter.adopt([tensor, tensor[3:], tensor])
        assert meter.live[DEVICE] == meter.peak[DEVICE] == 400
        tensor.add_(1)
        assert meter.live[DEVICE] == 400
        del tensor
        assert meter.live[DEVICE] == 0


def test_tensors_of_another_thread_count_once_adopted() -> None:
    made: list[torch.Tensor] = []
    with LiveBytes() as meter:
        thread = threading.Thread(target=lambda: made.append(torch.zeros(10)))
        thread.start()
        thread.join()
        assert meter.live[DEVICE] == 0
        meter.adopt(made)
        assert meter.live[DEVICE] == 40


def test_tensors_of_the_meta_device_count_as_if_they_were_real() -> None:
    def work(device: str) -> int:
        with LiveBytes() as meter:
            a = torch.zeros(64, 32, device=device)
            b = torch.nn.functional.silu(a @ a.t()).softmax(-1)
            (b @ a).sum()
        peak: int = meter.peak[DEVICE]
        return peak

    assert work("meta") == work("cpu") > 64 * 32 * 4


def test_gradients_and_what_autograd_keeps_are_counted() -> None:
    with LiveBytes() as meter:
        weight = torch.zeros(1000, requires_grad=True)
        loss = (weight * 2).exp().sum()
        assert meter.live[DEVICE] >= 3 * 4000 - 4000 + 4
        loss.backward()
        del loss
        assert weight.grad is not None
        assert meter.live[DEVICE] == 8000


def test_a_restarted_peak_starts_from_what_is_live() -> None:
    with LiveBytes() as meter:
        kept = torch.zeros(10)
        torch.zeros(1000)
        meter.restart_peak()
        assert meter.peak[DEVICE] == kept.nbytes
        torch.zeros(5)
        assert meter.peak[DEVICE] == kept.nbytes + 20


def test_a_bump_raises_the_peak_and_not_what_is_live() -> None:
    meter = LiveBytes()
    meter.bump(100)
    meter.bump(70, HOST)
    meter.bump(50)
    assert meter.peak == {DEVICE: 100, HOST: 70}
    assert meter.live == {DEVICE: 0, HOST: 0}


def test_a_storage_that_grows_in_place_counts_at_its_new_size() -> None:
    with LiveBytes() as meter:
        out = torch.empty(0)
        torch.add(torch.zeros(100), 1, out=out)
        assert out.untyped_storage().nbytes() == 400
        assert meter.live[DEVICE] == 400
        del out
        assert meter.live[DEVICE] == 0


def test_freed_addresses_that_are_used_again_are_counted_again() -> None:
    with LiveBytes() as meter:
        for size in range(1, 200):
            tensor = torch.zeros(size)
            assert meter.live[DEVICE] == 4 * size
            del tensor
    assert meter.live[DEVICE] == 0


def test_the_resident_set_is_bytes_of_this_process() -> None:
    assert peak_rss_bytes() > 2**24
    assert rss_bytes() > 2**24


@pytest.mark.parametrize("block_bytes", [2**14, MIB, 16 * MIB, 64 * MIB])
def test_the_resident_set_is_what_is_alive_once_freed_memory_was_returned(block_bytes: int) -> None:
    if not keep_freed_memory():
        pytest.skip("the C allocator keeps freed blocks here")
    size = 64 * MIB
    return_freed_memory()
    before = rss_bytes()
    blocks = [torch.ones(block_bytes, dtype=torch.uint8) for _ in range(size // block_bytes)]
    with_blocks = rss_bytes()
    del blocks
    return_freed_memory()
    after = rss_bytes()
    assert size * 0.9 < with_blocks - before < size * 1.1
    assert abs(after - before) < size * 0.1
    assert peak_rss_bytes() > before + size * 0.9
