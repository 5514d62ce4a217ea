"""Layer spans as the planner chooses them: within any budget that works, and never in place of something faster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import Tier
from engine.errors import DoesNotFitError
from engine.hardware import PROFILES
from engine.plan import Choices, Plan, Stage
from engine.planner import Planner, forecast
from stages import GrpoSettings, GrpoSpace, names
from tests.helpers import Done, budget, one_thread, random_group, run_plan, same_bits, step_space, tiny_config

CPU = PROFILES["cpu"]
LAYERS = 3
CHUNK_KINDS = ("prefill", "score", "replay", "sweep")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@cache
def space(*, tied: bool, layer_spans: int | None = None) -> GrpoSpace:
    """Return a run whose chunks, waves and blocks of rows are fixed, so that rounding is the same under all choices."""
    config = tiny_config("qwen3", num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    fixed = {"chunk_tokens": 8, "branches_at_once": 2, "head_rows": 8}
    fixed |= {} if layer_spans is None else {"layer_spans": layer_spans}
    options = GrpoSettings(page_tokens=8, dtype=torch.float64, fixed=fixed)
    return step_space(config, [random_group(1, 40, [9, 5]), random_group(2, 17, [3])], options)


def plan_of(**options: Any) -> Plan:
    found = space(**options)
    return found.lower(found.first())


@cache
def planner(**options: Any) -> Planner:
    return Planner(plan=plan_of(**options), profile=CPU)


@cache
def whole(*, tied: bool) -> Done:
    """Return a run of the whole model with room for everything."""
    return run_plan(plan_of(tied=tied, layer_spans=1), Path(tempfile.mkdtemp()) / "run")


def between(data: st.DataObject, low: int, high: int) -> int:
    return low + data.draw(st.integers(0, 16), label="sixteenths") * (high - low) // 16


@given(data=st.data(), tied=st.booleans())
@settings(max_examples=12)
def test_whatever_is_chosen_has_the_gradient_of_the_whole_model_and_keeps_its_plan(
    data: st.DataObject, tied: bool
) -> None:
    reference = whole(tied=tied)
    smallest = planner(tied=tied).smallest[1]
    room = between(data, smallest, reference.planned.peak_bytes[Tier.DEVICE])
    with tempfile.TemporaryDirectory() as folder:
        done = run_plan(plan_of(tied=tied), Path(folder) / "run", budget(device=room))
        assert same_bits(done.gradients, reference.gradients)
        measured, planned = done.outcome.measured_peak_bytes["device"], done.planned.peak_bytes[Tier.DEVICE]
        assert measured <= planned <= room
        pairs = done.outcome.stage_peak_bytes.items()
        exact = {name: pair for name, pair in pairs if name.split()[0] in CHUNK_KINDS}
        assert {name: pair for name, pair in exact.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("tied", [True, False])
def test_the_smallest_budget_of_all_is_that_of_spans_and_works(tied: bool, tmp_path: Path) -> None:
    found = planner(tied=tied)
    choices, smallest = found.smallest
    assert choices["layer_spans"] == LAYERS
    assert smallest < planner(tied=tied, layer_spans=1).smallest[1]
    done = run_plan(plan_of(tied=tied), tmp_path / "run", budget(device=smallest))
    assert done.planned.peak_bytes[Tier.DEVICE] == smallest
    assert same_bits(done.gradients, whole(tied=tied).gradients)
    with pytest.raises(DoesNotFitError, match=f"give --budget device={smallest} or more"):
        found.forecast(budget(device=smallest - 1))


@given(data=st.data(), tied=st.booleans())
@settings(max_examples=12)
def test_a_bigger_budget_is_never_slower_across_the_one_that_the_whole_model_needs(
    data: st.DataObject, tied: bool
) -> None:
    found = planner(tied=tied)
    rooms = sorted(
        between(data, found.smallest[1], 2 * whole(tied=tied).planned.peak_bytes[Tier.DEVICE]) for _ in range(2)
    )
    less, more = (found.forecast(budget(device=room)).makespan_s for room in rooms)
    assert more <= less * (1 + 1e-12)


@given(data=st.data(), tied=st.booleans())
@settings(max_examples=12)
def test_the_whole_model_is_taken_wherever_it_fits_and_is_faster(data: st.DataObject, tied: bool) -> None:
    found = planner(tied=tied)
    room = between(data, found.smallest[1], 2 * whole(tied=tied).planned.peak_bytes[Tier.DEVICE])
    chosen = found.forecast(budget(device=room))
    each = {
        spans: seconds
        for spans in (1, LAYERS)
        if (seconds := seconds_within(planner(tied=tied, layer_spans=spans), room)) is not None
    }
    assert chosen.makespan_s == min(each.values())
    assert chosen.plan.choices["layer_spans"] == min(each, key=lambda spans: (each[spans], spans))


def seconds_within(found: Planner, room: int) -> float | None:
    try:
        return found.forecast(budget(device=room)).makespan_s
    except DoesNotFitError:
        return None


def every(found: GrpoSpace) -> list[Choices]:
    return [dict(zip(found.ladders, values, strict=True)) for values in product(*found.ladders.values())]


def test_choices_are_never_thought_to_cost_more_than_their_stages_do() -> None:
    config = tiny_config("llama", num_hidden_layers=LAYERS)
    groups = [random_group(1, 300, [70, 5]), random_group(2, 100, [30])]
    for gradient in ("exact", "stop-prompt"):
        found = step_space(config, groups, GrpoSettings(page_tokens=16, gradient=gradient))
        for choices in every(found)[::5]:
            stages = found.sketch(choices).stages.values()
            cost, num_stages = found.least_cost(choices)
            least_s = CPU.seconds(cost) + (num_stages - 1) * CPU.stage_s
            real_s = sum(CPU.seconds(stage.cost) for stage in stages)
            assert 0.9 * real_s < least_s <= real_s * (1 + 1e-9)


def test_an_outline_needs_as_much_of_the_device_as_the_plan() -> None:
    config = tiny_config("llama", num_hidden_layers=5)
    found = step_space(config, [random_group(1, 700, [70, 5])], GrpoSettings(page_tokens=16))
    for choices in every(found)[::7]:
        sizes = [Planner(plan=plan, profile=CPU).smallest[1] for plan in bare(found, choices)]
        assert sizes[0] == sizes[1]


def bare(found: GrpoSpace, choices: Choices) -> list[Plan]:
    """Return the plan and its outline without a space, so that each is planned as it is."""
    return [replace(plan, space=None) for plan in (found.lower(choices), found.outline(choices))]


def test_a_stage_of_ones_own_that_uses_the_model_keeps_it_whole_and_the_refusal_says_so() -> None:
    config = tiny_config("llama", num_hidden_layers=LAYERS)
    found = step_space(config, [random_group(1, 40, [9, 5])], GrpoSettings())
    plan = found.lower(found.first()).hand_over()
    smallest = Planner(plan=plan, profile=CPU).smallest[1]
    plan.add(Stage(name="look", kind="look", run=lambda context: None, reads=(names.WEIGHTS,)))
    assert found.ladders["layer_spans"] == (1,)
    with pytest.raises(DoesNotFitError, match=r"the model has to be there whole: stage look uses it or its gradients"):
        forecast(plan, budget(device=smallest), CPU)
