"""A whole step on a GPU: the CPU's gradient, the planned bytes, the same bits again, whatever tier state lives on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.budget import UNLIMITED_BYTES, Budget, Tier
from engine.device import CudaDevice, open_device
from engine.device_kind import planning_for
from engine.plan import Plan
from engine.schedule import device_floor, staging_need
from engine.units import MIB
from stages import AdamWOptions, GrpoSettings
from stages.audit import max_rel_err
from tests.helpers import Done, budget, random_group, run_plan, same_bits, save_policy, step_space, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXED = {"chunk_tokens": 64, "branches_at_once": 2, "head_rows": 16}


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy") / "checkpoint", tiny_config("qwen3"))


@pytest.fixture(scope="module", name="hybrid")
def _hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("hybrid") / "checkpoint", tiny_config("qwen3_5_text"))


def step(policy: Path, dtype: torch.dtype) -> Plan:
    options = AdamWOptions(learning_rate=1e-3)
    settings = GrpoSettings(dtype=dtype, page_tokens=64, fixed=FIXED, optimizer=options)
    space = step_space(policy, [random_group(1, 500, [40, 15, 29])], settings)
    return space.lower(space.first())


def on_cuda(policy: Path, dtype: torch.dtype, run: Path, tier: Tier = Tier.DEVICE) -> tuple[Done, CudaDevice]:
    device = open_device("cuda")
    assert isinstance(device, CudaDevice)
    with planning_for(device.kind):
        plan = step(policy, dtype)
    floor, vectors = device_floor(plan)[0], sum(v.nbytes for v in plan.values.values() if Tier.DISK not in v.tiers)
    within = {
        Tier.DEVICE: Budget(device_bytes=4096 * MIB, host_bytes=UNLIMITED_BYTES, disk_bytes=UNLIMITED_BYTES),
        Tier.HOST: budget(device=floor),
        Tier.DISK: budget(device=floor, host=staging_need(plan) + vectors),
    }[tier]
    return run_plan(plan, run, within, device), device


def test_the_gradient_is_that_of_the_cpu(policy: Path, tmp_path: Path) -> None:
    expected = run_plan(step(policy, torch.float64), tmp_path / "cpu")
    done, _ = on_cuda(policy, torch.float64, tmp_path / "cuda")
    assert max_rel_err(done.gradients, expected.gradients) < 1e-10


def test_a_hybrids_gradient_is_that_of_the_cpu(hybrid: Path, tmp_path: Path) -> None:
    expected = run_plan(step(hybrid, torch.float64), tmp_path / "cpu")
    done, _ = on_cuda(hybrid, torch.float64, tmp_path / "cuda")
    assert max_rel_err(done.gradients, expected.gradients) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiers_change_no_bit_and_no_stage_passes_its_bytes(dtype: torch.dtype, policy: Path, tmp_path: Path) -> None:
    done = {}
    for tier in Tier:
        done[tier], device = on_cuda(policy, dtype, tmp_path / tier, tier)
        planned, measured = (
            done[tier].planned.peak_bytes[Tier.DEVICE],
            done[tier].outcome.measured_peak_bytes["device"],
        )
        assert planned - device.kind.kept_bytes - MIB <= measured <= planned
    assert same_bits(done[Tier.HOST].gradients, done[Tier.DEVICE].gradients)
    assert same_bits(done[Tier.DISK].gradients, done[Tier.DEVICE].gradients)


def test_the_allocator_is_capped_at_the_budget() -> None:
    device = open_device("cuda")
    device.cap(64 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device=device.torch_device)
    finally:
        device.cap(None)
