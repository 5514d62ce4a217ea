"""Stages of one's own: calls build the graph, and runs give what plain calls give."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import TensorSpec, stage
from engine.authoring import StageFunction
from engine.budget import UNLIMITED_BYTES, Budget, Tier, unlimited
from engine.errors import DoesNotFitError, EngineError
from engine.loader import find_plan
from engine.plan import PIECE_BYTES, Plan, Stage, Value, movable
from engine.planner import forecast
from engine.report import describe_outcome
from engine.runtime import execute
from engine.schedule import device_floor
from tests.own_stages import (
    CPU,
    add_to,
    beside,
    halves,
    matrix,
    metrics,
    mix,
    noise,
    run,
    show,
    square_into,
)

ROOT = Path(__file__).resolve().parents[2]


# Building


def test_calls_build_the_graph_and_their_names_and_needs_follow_from_the_function() -> None:
    plan = Plan(name="p")
    a = noise(plan, rows=2, columns=3, seed=1)
    b = mix(plan, a, a)
    c = mix(plan, right=b, left=a, scale=2.0, name="last")
    assert (a.name, b.name, c.name) == ("noise/out", "mix/out", "last/out")
    assert list(plan.graph().edges) == [("noise", "mix"), ("noise", "last"), ("mix", "last")]
    last = plan.stages["last"]
    assert (last.kind, last.reads, last.writes, last.updates) == ("mix", ("noise/out", "mix/out"), ("last/out",), ())
    assert last.workspace_bytes == 48 + 48  # declared, and what is returned
    assert last.cost.moved_bytes == 3 * 48
    assert b.tensors == {"tensor": matrix(2, 3)}


def test_stages_of_one_function_are_numbered_from_the_second_on() -> None:
    plan = Plan(name="p")
    for seed in range(3):
        noise(plan, rows=1, columns=1, seed=seed)
    noise(plan, rows=1, columns=1, seed=9, name="noise-5")
    noise(plan, rows=1, columns=1, seed=4)
    noise(plan, rows=1, columns=1, seed=5)
    assert list(plan.stages) == ["noise", "noise-2", "noise-3", "noise-5", "noise-4", "noise-6"]


def test_several_outputs_come_back_by_name_and_in_order() -> None:
    plan = Plan(name="p")
    low, high = found = halves(plan, noise(plan, rows=2, columns=2, seed=0))
    assert (low, high) == (found.low, found.high)
    assert (low.name, high.name) == ("halves/low", "halves/high")


def test_a_stage_that_fills_its_output_needs_no_bytes_for_what_it_returns() -> None:
    plan = Plan(name="p")
    square_into(plan, noise(plan, rows=4, columns=4, seed=0))
    assert plan.stages["square_into"].workspace_bytes == 0


def test_costs_are_numbers_or_functions_of_the_arguments() -> None:
    @stage(writes=matrix(2, 2), flops=lambda left, count: left.num_elements * count, moved_bytes=7)
    def work(left: Any, count: int) -> None: ...

    plan = Plan(name="p")
    work(plan, noise(plan, rows=2, columns=3, seed=0), 5)
    assert (plan.stages["work"].cost.flops, plan.stages["work"].cost.moved_bytes) == (30, 7)


def test_a_value_of_many_tiny_pieces_stays_off_the_disk_where_each_would_be_a_file() -> None:
    plan = Plan(name="p")
    prime = 262147  # rows that no number divides
    assert plan.accumulator("long", matrix(prime, 1)).tiers == (Tier.DEVICE, Tier.HOST)
    assert plan.accumulator("even", matrix(2**18, 1)).tiers == (Tier.DEVICE, Tier.HOST, Tier.DISK)


@given(rows=st.integers(1, 10_000), columns=st.integers(1, 10_000))
def test_pieces_are_whole_rows_and_as_many_as_fit_a_piece(rows: int, columns: int) -> None:
    (spec,) = movable("v", {"t": matrix(rows, columns)}, origin="").tensors.values()
    assert spec.piece_rows * spec.num_pieces == rows
    assert spec.piece_bytes <= PIECE_BYTES or spec.piece_rows == 1
    larger = [count for count in range(spec.piece_rows + 1, rows + 1) if rows % count == 0]
    assert all(count * columns * 8 > PIECE_BYTES for count in larger)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_value_of_several_pieces_comes_back_from_disk_as_it_was(dtype: str, tmp_path: Path) -> None:
    spec = matrix(96, 1024 * (1 if dtype == "float64" else 4), dtype)

    @stage(writes=spec, workspace_bytes=spec.nbytes * 8)
    def numbers() -> torch.Tensor:
        return torch.arange(spec.num_elements).view(spec.shape).to(getattr(torch, dtype))

    @stage(workspace_bytes=spec.nbytes)
    def large() -> None: ...

    @stage(workspace_bytes=spec.nbytes * 8)
    def compare(found: torch.Tensor, report: Callable[[str, Any], None]) -> None:
        report("same", torch.equal(found, numbers.function()))

    plan = Plan(name="p")
    made = numbers(plan)
    large(plan)
    compare(plan, made)
    assert made.tensors["tensor"].num_pieces == 3
    object.__setattr__(plan.stages["large"], "workspace_bytes", 10 * spec.nbytes)
    budget = Budget(device_bytes=10 * spec.nbytes, host_bytes=PIECE_BYTES, disk_bytes=spec.nbytes)
    planned = forecast(plan, budget, CPU)
    assert planned.moved_bytes == {"device->disk": spec.nbytes, "disk->device": spec.nbytes}
    assert execute(planned, tmp_path / "run").results["metrics"] == {"same": True}


def test_size_functions_see_the_tensors_of_a_value_by_name_and_the_function_gets_them_by_name(tmp_path: Path) -> None:
    @stage(writes=lambda pair: TensorSpec(shape=(pair["a"].shape[0] + pair["b"].shape[0],), dtype="float32"))
    def joined(pair: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([pair["a"] + 1, pair["b"] + 2])

    @stage(updates="pair")
    def touch(pair: dict[str, torch.Tensor]) -> None:
        pair["a"].add_(1)

    plan = Plan(name="p")
    specs = {key: TensorSpec(shape=(size,), dtype="float32") for key, size in (("a", 1), ("b", 2))}
    pair = plan.variable("pair", specs)
    touch(plan, pair)
    object.__setattr__(plan.stages["touch"], "workspace_bytes", 0)
    made = joined(plan, pair)
    object.__setattr__(plan.stages["joined"], "workspace_bytes", 1000)
    show(plan, key="joined", tensors=[made])
    assert metrics(plan, tmp_path / "run")["joined"] == [[2.0, 2.0, 2.0]]


def test_the_plain_function_stays_at_hand() -> None:
    left = torch.ones(2, 2, dtype=torch.float64)
    assert torch.equal(mix.function(left, left), left * 1.5)


def test_a_plan_of_own_stages_is_built_and_simulated_without_torch_or_transformers() -> None:
    program = """
        import sys
        from engine.budget import unlimited
        from engine.hardware import PROFILES
        from engine.loader import find_plan
        from engine.planner import forecast
        planned = forecast(find_plan("custom_stage").plan({}), unlimited(), PROFILES["cpu"])
        print(len(planned.schedule.stages), sorted({"torch", "transformers"} & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "45 []\n"


# Running: what plain calls give


@dataclass
class Twin:
    """A plan beside the plain calls that it stands for."""

    plan: Plan = field(default_factory=lambda: Plan(name="random"))
    pairs: list[tuple[Value, torch.Tensor]] = field(default_factory=list)
    shown: dict[str, list[list[float]]] = field(default_factory=dict)

    def call(self, function: StageFunction[Any], *picked: int, **config: Any) -> None:
        found = function(self.plan, *(self.pairs[index][0] for index in picked), **config)
        plain = function.function(*(self.pairs[index][1] for index in picked), **config)
        self.pairs += [(found, plain)] if isinstance(found, Value) else [(getattr(found, k), plain[k]) for k in plain]

    def fill(self, picked: int) -> None:
        value, plain = self.pairs[picked]
        out = torch.empty_like(plain)
        square_into.function(plain, out)
        self.pairs.append((square_into(self.plan, value), out))

    def total(self, picked: Sequence[int], number: int) -> None:
        like = self.pairs[picked[0]][1]
        total = self.plan.accumulator(f"total{number}", matrix(*like.shape))
        plain = torch.zeros_like(like)
        for index in picked:
            add_to(self.plan, total, self.pairs[index][0])
            add_to.function(plain, self.pairs[index][1])
        self.pairs.append((total, plain))

    def show(self, picked: Sequence[int], key: str) -> None:
        show(self.plan, key=key, tensors=[self.pairs[index][0] for index in picked])
        self.shown[key] = [self.pairs[index][1].flatten().tolist() for index in picked]


def random_twin(rng: random.Random) -> Twin:
    twin = Twin()
    rows, columns = rng.randint(1, 4), rng.randint(1, 4)
    for seed in range(rng.randint(1, 3)):
        twin.call(noise, rows=rows, columns=columns, seed=seed)
    for number in range(rng.randint(1, 8)):
        first = rng.randrange(len(twin.pairs))
        alike = [i for i, (_, plain) in enumerate(twin.pairs) if plain.shape == twin.pairs[first][1].shape]
        match rng.choice(["mix", "beside", "halves", "fill", "total", "show"]):
            case "mix":
                twin.call(mix, first, rng.choice(alike), scale=rng.uniform(-1, 1))
            case "beside":
                twin.call(beside, *(rng.randrange(len(twin.pairs)) for _ in range(rng.randint(1, 3))))
            case "halves":
                twin.call(halves, first)
            case "fill":
                twin.fill(first)
            case "total":
                twin.total([rng.choice(alike) for _ in range(rng.randint(1, 3))], number)
            case "show":
                twin.show([first], f"shown{number}")
    twin.show(range(len(twin.pairs)), "all")
    return twin


def random_budget(rng: random.Random, plan: Plan) -> Budget:
    floor, _ = device_floor(plan)
    everything = sum(value.nbytes for value in plan.values.values())
    host = rng.choice([UNLIMITED_BYTES, rng.randint(0, everything)])
    return Budget(device_bytes=floor + rng.randint(0, everything), host_bytes=host, disk_bytes=UNLIMITED_BYTES)


@given(st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_under_any_budget_a_plan_gives_the_bits_of_plain_calls(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    twin = random_twin(rng)
    try:
        planned = forecast(twin.plan, random_budget(rng, twin.plan), CPU)
    except DoesNotFitError:  # the host is too small for what leaves the device
        return
    outcome = execute(planned, tmp_path_factory.mktemp("random") / "run")
    assert outcome.results["metrics"] == twin.shown
    assert outcome.measured_peak_bytes["device"] <= planned.peak_bytes[Tier.DEVICE]


def test_the_planned_bytes_of_a_stage_are_those_that_it_takes(tmp_path: Path) -> None:
    plan = Plan(name="p")
    a = noise(plan, rows=8, columns=8, seed=0)
    mix(plan, a, square_into(plan, a))
    outcome = run(plan, tmp_path / "run")
    assert outcome.stage_peak_bytes == {"noise": (1024, 1024), "square_into": (1024, 1024), "mix": (2560, 2560)}


def test_reports_are_among_the_metrics_of_the_run_and_of_its_closing_text(tmp_path: Path) -> None:
    @stage(workspace_bytes=4)
    def tell(report: Callable[[str, Any], None]) -> None:
        report("one", torch.tensor(1.5))
        report("words", {"two": ["three", None, True]})

    plan = Plan(name="p")
    tell(plan)
    planned = forecast(plan, unlimited(), CPU)
    outcome = execute(planned, tmp_path / "run")
    closing = describe_outcome(planned, outcome, "run", {}).splitlines()
    assert {"one: 1.5", "words: {'two': ['three', None, True]}"} <= set(closing)
    wanted = {"one": 1.5, "words": {"two": ["three", None, True]}}
    assert outcome.as_dict()["metrics"] == wanted
    assert json.loads((tmp_path / "run/results/metrics.jsonl").read_text()).items() >= wanted.items()


def test_a_report_survives_a_stage_that_begins_the_metrics_anew(tmp_path: Path) -> None:
    plan = Plan(name="p")
    first = noise(plan, rows=1, columns=1, seed=0)
    show(plan, key="early", tensors=[first])
    plan.add(Stage(name="loss", kind="loss", run=lambda context: context.results.update(metrics={"kl": 0.0})))
    assert metrics(plan, tmp_path / "run").keys() == {"kl", "early"}


def test_autograd_inside_a_function_ends_with_it(tmp_path: Path) -> None:
    @stage(writes=lambda point: point, workspace_bytes=10_000)
    def slope(point: torch.Tensor) -> torch.Tensor:
        leaf = point.clone().requires_grad_()
        (leaf.sin() * leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad + leaf * 0  # has a graph

    @stage(writes=lambda point: point, workspace_bytes=10_000)
    def kept(point: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(point.clone().requires_grad_() * 2)

    plan = Plan(name="p")
    point = noise(plan, rows=2, columns=2, seed=0)
    show(plan, key="both", tensors=[slope(plan, point), kept(plan, point)])
    x = noise.function(rows=2, columns=2, seed=0)
    expected = [(x.cos() * x + x.sin()).flatten().tolist(), (2 * x).flatten().tolist()]
    assert metrics(plan, tmp_path / "run")["both"] == expected


def test_a_variable_is_read_between_its_changes_and_an_accumulator_after_them(tmp_path: Path) -> None:
    plan = Plan(name="p")
    total = plan.variable("total", matrix(1, 1))
    one = noise(plan, rows=1, columns=1, seed=0)
    for key in ("once", "twice"):
        add_to(plan, total, one)
        show(plan, key=key, tensors=[total])
    found = metrics(plan, tmp_path / "run")
    assert found["twice"][0][0] == 2 * found["once"][0][0] != 0


# The shipped plan


def test_the_shipped_plan_of_own_stages_finds_what_a_direct_computation_finds(tmp_path: Path) -> None:
    plans = find_plan("custom_stage")
    plan = plans.plan({"parts": "7", "buckets": "512"})
    floor, _ = device_floor(plan)
    budget = Budget(device_bytes=floor, host_bytes=96 * 1024, disk_bytes=2**20)
    planned = forecast(plan, budget, CPU)
    assert all(planned.peak_bytes[tier] > 0 for tier in Tier)
    outcome = execute(planned, tmp_path / "run")

    module = sys.modules[plans.build.__module__]
    parts = [torch.empty(len(module.topics_of(part, 7)), 512) for part in range(7)]
    for part, out in enumerate(parts):
        module.count_words.function(out, part=part, parts=7, buckets=512)
    rows = torch.cat(parts).double()
    names = [name for part in range(7) for name in module.topics_of(part, 7)]
    similarity = (rows @ rows.T).triu(diagonal=1)
    row, column = divmod(int(similarity.argmax()), len(names))
    found = outcome.results["metrics"]
    assert found["mean_similarity"] == pytest.approx(
        float(similarity.sum()) / (len(names) * (len(names) - 1) / 2), rel=1e-5
    )
    assert found["closest_similarity"] == pytest.approx(float(similarity[row, column]), rel=1e-5)
    assert sorted(found["closest_topics"]) == sorted([names[row], names[column]])
    assert outcome.measured_peak_bytes["device"] == pytest.approx(planned.peak_bytes[Tier.DEVICE], rel=0.01)


def test_the_shipped_plan_refuses_settings_that_mean_nothing() -> None:
    with pytest.raises(EngineError, match="parts=0 must be 1 to"):
        find_plan("custom_stage").plan({"parts": "0"})
