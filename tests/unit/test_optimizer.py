"""State that outlives an update: torch's AdamW over many updates, on any tier, through a file, to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.utils import clip_grad_norm_

from engine.budget import Budget, Tier
from engine.errors import StageFailedError, UsageError
from engine.plan import Plan, TensorSpec
from engine.schedule import device_floor, staging_need
from models.float64 import accumulation_dtype
from stages import AdamWOptions, optimizer, optimizer_file, shard_layout
from stages.learning_rate import learning_rate_at
from stages.optimizer import OptimizerState, save_stage
from stages.optimizer_file import Writer, read_optimizer_file
from stages.shard_layout import LANES
from tests.helpers import Gradients, budget, same_bits
from tests.updates import SHAPES, Updated, Updates, first_weights, gradient_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
OPTIONS = AdamWOptions(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, max_grad_norm=20.0)
RATES = [learning_rate_at(u, total=6, peak=3e-2, warmup=2, schedule="cosine") for u in range(6)]


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the state into many pieces and Values."""
    monkeypatch.setattr(shard_layout, "PIECE_ELEMENTS", 100)
    monkeypatch.setattr(optimizer, "PIECES_A_VALUE", 3)


def global_norm(gradients: Gradients) -> float:
    return math.sqrt(math.fsum(torch.linalg.vector_norm(tensor).item() ** 2 for tensor in gradients.values()))


def torch_updates(weights: Gradients, *, fused: bool) -> tuple[Gradients, Any]:
    """Return the weights after `RATES` by torch alone, through masters where they are narrow, and its optimizer.

    Fused with our own clipping factor, so that bits can be compared; otherwise all is torch's, its clipping too.
    """
    dtype = next(iter(weights.values())).dtype
    wide = accumulation_dtype(dtype)
    masters = {name: torch.nn.Parameter(tensor.to(wide, copy=True)) for name, tensor in weights.items()}
    betas = (OPTIONS.beta1, OPTIONS.beta2)
    adamw = torch.optim.AdamW(
        masters.values(), betas=betas, eps=OPTIONS.eps, weight_decay=OPTIONS.weight_decay, fused=fused, foreach=False
    )
    for update, rate in enumerate(RATES):
        gradients = gradient_of({name: tensor.detach().to(dtype) for name, tensor in masters.items()}, update)
        scale = torch.tensor([min(1.0, OPTIONS.max_grad_norm / (global_norm(gradients) + 1e-6))], dtype=wide)
        for name, master in masters.items():
            master.grad = gradients[name] * scale if fused else gradients[name]
        if not fused:
            clip_grad_norm_(masters.values(), OPTIONS.max_grad_norm, foreach=False)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    return {name: tensor.detach().to(dtype) for name, tensor in masters.items()}, adamw


# Numbers


@pytest.mark.usefixtures("many_pieces")
def test_in_float64_six_updates_are_those_of_torch_to_twelve_digits(tmp_path: Path) -> None:
    weights = first_weights(torch.float64)
    found = Updates(weights=weights, rates=RATES, options=OPTIONS).run(tmp_path / "run").weights
    expected, _ = torch_updates(weights, fused=False)
    assert found.keys() == SHAPES.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
        assert not torch.equal(tensor, weights[name])


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_six_updates_have_the_bits_of_torchs_fused_kernel_on_whole_parameters(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = first_weights(dtype)
    found = Updates(weights=weights, rates=RATES, options=OPTIONS).run(tmp_path / "run").weights
    assert same_bits(found, torch_updates(weights, fused=True)[0])


def test_the_clipping_and_the_scheduled_rates_of_these_tests_matter() -> None:
    norms = [global_norm(gradient_of(first_weights(torch.float64), update)) for update in range(6)]
    assert all(norm > OPTIONS.max_grad_norm for norm in norms)
    assert len(set(RATES)) == 4  # up, at the peak, down


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1, 100, 700])
def test_the_length_of_pieces_changes_no_bit(
    elements: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = Updates(weights=first_weights(dtype), rates=RATES, options=OPTIONS)
    whole = updates.run(tmp_path / "whole")
    monkeypatch.setattr(shard_layout, "PIECE_ELEMENTS", elements)
    assert len(updates.state().pieces) > sum(math.prod(shape) for shape in SHAPES.values()) / (elements + LANES)
    assert same_bits(updates.run(tmp_path / "cut").weights, whole.weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_update_has_the_same_bits_whether_its_state_is_kept_or_not(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = first_weights(dtype)
    kept, not_kept = (
        Updates(weights=weights, rates=RATES[:1], options=OPTIONS, kept=kept).run(tmp_path / str(kept))
        for kept in (True, False)
    )
    assert same_bits(kept.weights, not_kept.weights)
    assert [name for name in not_kept.plan.values if name.startswith("optimizer")] == []


def one_sided(weights: Mapping[str, torch.Tensor], update: int) -> Gradients:
    return {name: torch.ones(weight.shape, dtype=accumulation_dtype(weight.dtype)) for name, weight in weights.items()}


def test_bfloat16_weights_move_at_a_learning_rate_of_a_millionth_as_their_masters_do(tmp_path: Path) -> None:
    rates = [1e-6] * 40  # as small as half of the distance between bfloat16 numbers in all
    weights = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    found = Updates(weights=weights, rates=rates, gradient=one_sided, save_for=torch.bfloat16).run(tmp_path / "run")
    assert all(bool((tensor < weights[name]).all()) for name, tensor in found.weights.items())
    masters = load_file(found.file)
    for name, tensor in found.weights.items():
        assert torch.equal(masters[f"master.{name}"].to(torch.bfloat16), tensor)

    without = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
    adamw = torch.optim.AdamW(without.values(), lr=rates[0], weight_decay=0.0)
    for update in range(len(rates)):
        for name, gradient in one_sided(weights, update).items():
            without[name].grad = gradient.to(torch.bfloat16)
        adamw.step()
    assert same_bits({name: tensor.detach() for name, tensor in without.items()}, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_weights_that_are_not_finite_are_told_with_their_parameter(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = first_weights(dtype)
    weights["up.bias"][3] = torch.finfo(dtype).max
    options = AdamWOptions(weight_decay=1.0)
    with pytest.raises(StageFailedError, match=r"new weights are not finite \(in up.bias\); lower learning_rate=-?4"):
        Updates(weights=weights, rates=[4.0], options=options, gradient=one_sided).run(tmp_path / "run")


# Tiers


def tier_budget(tier: str, plan: Plan) -> Budget:
    """Return the budget under which the state of ``plan`` lives there."""
    floor, _ = device_floor(plan)
    file_bytes = plan.values["optimizer"].nbytes if "optimizer" in plan.values else 0
    state_bytes = sum(value.nbytes for value in plan.values.values() if value.name.startswith("optimizer/"))
    match tier:
        case "device":
            return budget(host=0, disk=file_bytes)
        case "host":
            return budget(device=floor, disk=file_bytes)
        case "disk":
            return budget(device=floor, host=staging_need(plan))
        case "device and host":
            return budget(device=floor + state_bytes // 2, disk=file_bytes)
        case _:
            return budget(device=floor, host=staging_need(plan) + state_bytes // 2)


TIERS = ["device", "host", "disk", "device and host", "host and disk"]


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_the_state_lives_changes_no_bit_and_takes_what_was_planned(
    dtype: torch.dtype, tier: str, tmp_path: Path
) -> None:
    updates = Updates(weights=first_weights(dtype), rates=RATES, options=OPTIONS, save_for=dtype)
    done = updates.run(tmp_path / "run", tier_budget(tier, updates.plan()))
    anywhere = updates.run(tmp_path / "anywhere")
    assert same_bits(done.weights, anywhere.weights)
    assert done.file.read_bytes() == anywhere.file.read_bytes()
    measured = done.outcome.measured_peak_bytes
    on_disk = measured["disk"] > anywhere.outcome.measured_peak_bytes["disk"]
    assert (measured["host"] > 0, on_disk) == ("host" in tier or "disk" in tier, "disk" in tier)


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_stage_takes_the_device_bytes_that_were_planned_to_the_byte(
    dtype: torch.dtype, tier: str, kept: bool, tmp_path: Path
) -> None:
    rates = RATES if kept else RATES[:1]
    updates = Updates(weights=first_weights(dtype), rates=rates, options=OPTIONS, kept=kept)
    done = updates.run(tmp_path / "run", tier_budget(tier, updates.plan()))
    made = {name: peaks for name, peaks in done.outcome.stage_peak_bytes.items() if not name.startswith("make")}
    assert {name for name, (planned, measured) in made.items() if planned != measured} == set()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keeping_the_state_costs_the_device_nothing_more_where_it_can_leave(dtype: torch.dtype) -> None:
    needs = []
    for kept in (False, True):
        plan = Updates(weights=first_weights(dtype), rates=RATES[:1], kept=kept).plan()
        stage = plan.stages["adamw0"]
        needs.append(stage.workspace_bytes + sum(map(plan.buffer_bytes, stage.streams)))
    assert needs[0] == needs[1]


# Layout


@given(
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    elements=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
)
def test_parts_cover_every_parameter_once_in_order_and_never_overlap(
    sizes: list[int], elements: int, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    parameters = {f"p{number}": TensorSpec(shape=(size,), dtype=name) for number, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_layout, "PIECE_ELEMENTS", elements)
        state = OptimizerState(parameters=parameters, dtype=dtype)
        pieces = state.pieces
        assert state.piece_elements <= min(elements, max(sizes)) + LANES - 1
    parts = [part for piece in pieces for part in piece]
    covered = [(part.parameter, element) for part in parts for element in range(part.start, part.start + part.count)]
    assert covered == [(f"p{number}", element) for number, size in enumerate(sizes) for element in range(size)]
    for piece in pieces:
        assert all(left.first + left.count <= right.first for left, right in pairwise(piece))
        assert piece[-1].first + piece[-1].count <= state.piece_elements
    assert all(part.start % LANES == part.first % LANES == 0 for part in parts)
    assert sum(value.tensors["state"].num_pieces for value in state.values()) == len(pieces)


def test_the_state_of_a_large_model_takes_no_more_than_its_numbers_need() -> None:
    layer = {"a": (4096, 4096), "b": (1024, 4096), "c": (14336, 4096), "norm": (4096,)}
    shapes = {"embed": (128256, 4096)} | {f"{i}.{name}": shape for i in range(32) for name, shape in layer.items()}
    parameters = {name: TensorSpec(shape=shape, dtype="bfloat16") for name, shape in shapes.items()}
    state = OptimizerState(parameters=parameters, dtype=torch.bfloat16)
    needed = 12 * sum(spec.num_elements for spec in parameters.values())
    assert needed <= sum(value.nbytes for value in state.values()) < needed * 1.001
    assert state.piece_bytes == 3 * 4 * state.piece_elements <= 12 * 2**20
    assert all(Tier.DISK in value.tiers for value in state.values())


def test_a_state_that_is_not_kept_serves_one_update_and_is_not_saved() -> None:
    updates = Updates(weights=first_weights(torch.float32), rates=RATES[:2], kept=False)
    with pytest.raises(ValueError, match="update 1 needs the state of the one before it"):
        updates.plan()
    with pytest.raises(ValueError, match="not kept"):
        save_stage([updates.state()], name="s", path="s", updates=1, checkpoint_dtype=torch.float32)


# Files

SAVED = [  # the dtype of the weights and of the checkpoint
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float16),
]


def saved_run(folder: Path, dtype: torch.dtype, stored: torch.dtype, updates: int = 3) -> Updated:
    """Return a run of the first updates that leaves its state."""
    weights = first_weights(dtype)
    return Updates(weights=weights, rates=RATES[:updates], options=OPTIONS, save_for=stored).run(folder)


def going_on(before: Updated, stored: torch.dtype, **changes: Any) -> Updates:
    """Return the run of the updates after the third, from the checkpoint in ``stored`` and the state beside it."""
    weights = {name: tensor.to(stored).to(tensor.dtype) for name, tensor in before.weights.items()}
    arguments: dict[str, Any] = {"rates": RATES[3:], "options": OPTIONS, "source": before.file, **changes}
    return Updates(weights=weights, **arguments)


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize(("dtype", "stored"), SAVED, ids=str)
def test_going_on_from_a_saved_state_has_the_bits_of_a_run_that_was_not_cut(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    whole = saved_run(tmp_path / "whole", dtype, stored, updates=6)
    before = saved_run(tmp_path / "before", dtype, stored)
    after = going_on(before, stored, save_for=stored).run(tmp_path / "after")
    assert same_bits(after.weights, whole.weights)
    assert after.file.read_bytes() == whole.file.read_bytes()
    assert read_optimizer_file(after.file).contents.count == 6


def test_one_update_may_go_on_from_a_state_without_keeping_it(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.bfloat16, torch.bfloat16)
    kept, not_kept = (
        going_on(before, torch.bfloat16, rates=RATES[3:4], kept=kept).run(tmp_path / str(kept))
        for kept in (True, False)
    )
    assert same_bits(kept.weights, not_kept.weights)


@pytest.mark.parametrize(("dtype", "stored"), SAVED, ids=str)
def test_loading_and_saving_take_the_bytes_that_were_planned(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    before = saved_run(tmp_path / "before", dtype, stored)
    after = going_on(before, stored, save_for=stored).run(tmp_path / "after")
    peaks = after.outcome.stage_peak_bytes
    restored = "restore weights"
    assert (restored in peaks) == ("master" in {name.split(".")[0] for name in load_file(before.file)})
    for stage in ("load optimizer", *([restored] if restored in peaks else ()), "adamw0", "optimizer"):
        planned, measured = peaks[stage]
        assert 0 <= planned - measured <= planned * 0.001, stage
    assert after.plan.values["optimizer"].nbytes == after.file.stat().st_size
    assert after.outcome.measured_peak_bytes["disk"] == after.file.stat().st_size


@pytest.mark.parametrize(("dtype", "stored"), SAVED, ids=str)
def test_the_file_is_safetensors_with_the_state_that_torch_has(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    done = saved_run(tmp_path / "run", dtype, stored, updates=6)
    weights, adamw = torch_updates(first_weights(dtype), fused=True)
    found = load_file(done.file)
    kinds = {"exp_avg", "exp_avg_sq"} | ({"master"} if stored.itemsize < 4 or dtype is not stored else set())
    assert {name.split(".")[0] for name in found} == kinds
    for name, parameter in zip(SHAPES, adamw.param_groups[0]["params"], strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{kind}.{name}"], adamw.state[parameter][kind])
        if "master" in kinds:
            assert torch.equal(found[f"master.{name}"], parameter.detach())
            assert torch.equal(found[f"master.{name}"].to(dtype), weights[name])
    with safe_open(done.file, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "longstraw-optimizer-state"
    assert metadata["count"] == "6"
    assert metadata["checkpoint_dtype"] == str(stored).removeprefix("torch.")


def test_a_file_that_another_program_wrote_again_is_the_same_state(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.bfloat16, torch.bfloat16)
    expected = going_on(before, torch.bfloat16).run(tmp_path / "expected")
    rewrite(before.file, lambda tensors, metadata: None)
    again = going_on(before, torch.bfloat16).run(tmp_path / "again")
    assert same_bits(again.weights, expected.weights)


def rewrite(path: Path, change: Callable[[Gradients, dict[str, str]], None]) -> None:
    """Write a safetensors file again by the library, after ``change`` of its tensors and metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(dict(sorted(tensors.items(), reverse=True)), path, metadata=metadata)


def drop(name: str) -> Callable[[Gradients, dict[str, str]], None]:
    def change(tensors: Gradients, metadata: dict[str, str]) -> None:
        del tensors[name]

    return change


def tell(**changes: str) -> Callable[[Gradients, dict[str, str]], None]:
    return lambda tensors, metadata: metadata.update(changes)


def reshape(tensors: Gradients, metadata: dict[str, str]) -> None:
    for name in list(tensors):
        if name.endswith(".head"):
            tensors[name] = tensors[name].T.contiguous()


def drop_parameter(tensors: Gradients, metadata: dict[str, str]) -> None:
    for name in list(tensors):
        if name.endswith("up.bias"):
            del tensors[name]


def narrow(tensors: Gradients, metadata: dict[str, str]) -> None:
    tensors["exp_avg.norm"] = tensors["exp_avg.norm"].half()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reshape, r"is of another model: head is of shape \[7, 11\] there and of shape \[11, 7\] in the policy \(1 "),
        (drop_parameter, r"is of another model: up.bias is missing there and of shape \[5\] in the policy \(1 "),
        (drop("exp_avg_sq.norm"), r"is damaged: ValueError: exp_avg_sq.norm"),
        (narrow, r"is damaged: ValueError: its tensors are F16, F32, not all of one of F32, F64"),
        (tell(format="pt"), r"is a safetensors file, but not an optimizer state"),
        (tell(version="2"), r"has format version '2', and only '1' is read"),
        (tell(count="0"), r"is damaged: ValueError: its metadata is .*'count': '0'"),
        (tell(count="many"), r"is damaged: ValueError: invalid literal"),
        (tell(checkpoint_dtype="int3"), r"is damaged: ValueError: its metadata is "),
        (tell(**{"crc32c.exp_avg": "xyz"}), r"is damaged: ValueError: invalid literal"),
    ],
)
def test_a_foreign_state_is_refused_when_the_run_is_planned(
    change: Callable[[Gradients, dict[str, str]], None], message: str, tmp_path: Path
) -> None:
    before = saved_run(tmp_path / "before", torch.bfloat16, torch.bfloat16)
    rewrite(before.file, change)
    with pytest.raises(UsageError, match=message):
        going_on(before, torch.bfloat16).plan()


@pytest.mark.parametrize("cut", [lambda data: data[:-1], lambda data: data[:7], lambda data: b"", lambda d: b"x" * 500])
def test_a_file_that_is_not_whole_is_refused_when_the_run_is_planned(
    cut: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    before = saved_run(tmp_path / "before", torch.float32, torch.float32)
    before.file.write_bytes(cut(before.file.read_bytes()))
    with pytest.raises(UsageError, match=r"optimizer.safetensors is damaged, or no safetensors file: "):
        going_on(before, torch.float32).plan()


def test_a_file_that_is_not_there_is_told_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no optimizer state at .*nowhere.safetensors"):
        read_optimizer_file(tmp_path / "nowhere.safetensors")


def test_a_state_in_another_dtype_or_without_the_masters_that_are_needed_is_refused(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.float32, torch.float32)
    for dtype, message in (
        (torch.float64, "is in float32, but this run keeps it in float64"),
        (torch.bfloat16, "has no master weights, which dtype='bfloat16' needs; choose dtype=float32"),
    ):
        weights = {name: tensor.to(dtype) for name, tensor in before.weights.items()}
        with pytest.raises(UsageError, match=message):
            Updates(weights=weights, rates=RATES, source=before.file).plan()


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "master"])
def test_a_bit_that_flipped_is_found_before_any_work_is_done(kind: str, tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.bfloat16, torch.bfloat16)
    data = bytearray(before.file.read_bytes())
    header = json.loads(data[8 : (first := 8 + int.from_bytes(data[:8], "little"))])
    data[first + header[f"{kind}.up.weight"]["data_offsets"][0] + 40] ^= 1  # the last bit of a number's fraction
    before.file.write_bytes(data)
    with pytest.raises(StageFailedError, match=rf"is damaged: CRC32C of {kind} is 0x\w{{8}}, not 0x\w{{8}}"):
        going_on(before, torch.bfloat16).run(tmp_path / "run")


def test_numbers_that_are_not_finite_are_not_gone_on_from(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.float32, torch.float32)

    def spoil(tensors: Gradients, metadata: dict[str, str]) -> None:
        tensors["exp_avg_sq.norm"][3] = math.nan

    rewrite(before.file, spoil)
    with pytest.raises(StageFailedError, match="exp_avg_sq has numbers that are not finite"):
        going_on(before, torch.float32).run(tmp_path / "run")


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)], ids=str)
def test_a_state_of_other_weights_is_refused_before_any_work_is_done(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    before = saved_run(tmp_path / "before", dtype, stored)
    updates = going_on(before, stored)
    updates.weights["up.weight"][7, 3] *= 1.5
    with pytest.raises(StageFailedError, match=r"is of other weights: up.weight is not the rounding of its master"):
        updates.run(tmp_path / "run")


def test_a_state_that_changed_after_planning_stops_the_run(tmp_path: Path) -> None:
    before = saved_run(tmp_path / "before", torch.float32, torch.float32)
    updates = going_on(before, torch.float32)
    source = updates.state().source
    assert source is not None
    saved_run(tmp_path / "other", torch.float32, torch.float32, updates=2).file.replace(before.file)
    with pytest.raises(StageFailedError, match="has changed since the run was planned"), source.reading():
        pass
    before.file.unlink()
    with pytest.raises(StageFailedError, match="can't be read any more: no optimizer state at"), source.reading():
        pass


def test_a_file_that_could_not_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def append(self: Writer, kind: str, array: Any) -> None:
        written.append(kind)
        if len(written) == 5:
            raise OSError("the disk is gone")

    monkeypatch.setattr(optimizer_file.Writer, "append", append)
    with pytest.raises(StageFailedError, match="the disk is gone"):
        saved_run(tmp_path / "run", torch.float32, torch.float32)
    assert list((tmp_path / "run" / "results" / "saved").iterdir()) == []


def test_a_file_with_numbers_missing_is_never_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_file.Writer, "append", lambda self, kind, array: None)
    with pytest.raises(StageFailedError, match="the file is not complete"):
        saved_run(tmp_path / "run", torch.float32, torch.float32)
