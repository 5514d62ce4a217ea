"""Plans: what is no plan is refused by name, what is one has one order, and recipe keys follow the data."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.budget import Tier
from engine.errors import PlanError, UsageError
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.recipe import digest, recipe_keys

IMMUTABLE, ACCUMULATOR, ORDERED = ValueKind.IMMUTABLE, ValueKind.ACCUMULATOR, ValueKind.ORDERED


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def stage(name: str, **needs: Any) -> Stage:
    return Stage(name=name, kind="work", run=nothing, **needs)


def plan_of(values: dict[str, ValueKind], *stages: Stage) -> Plan:
    plan = Plan(name="p")
    for name, kind in values.items():
        plan.value(Value(name=name, tensors={"t": TensorSpec(shape=(2,), dtype="float32")}, kind=kind))
    for item in stages:
        plan.add(item)
    return plan


def order(plan: Plan) -> list[str]:
    return [item.name for item in plan.ordered()]


# Sizes


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes", "piece_bytes"),
    [
        ((3, 4), "float32", 48, 16),
        ((3, 4), "bfloat16", 24, 8),
        ((5,), "float64", 40, 8),
        ((2, 3, 4), "bool", 24, 12),
        ((), "float32", 4, 4),
        ((0, 7), "int64", 0, 0),
    ],
)
def test_bytes_follow_from_shape_and_dtype(shape: tuple[int, ...], dtype: str, nbytes: int, piece_bytes: int) -> None:
    spec = TensorSpec(shape=shape, dtype=dtype)
    assert (spec.nbytes, spec.piece_bytes) == (nbytes, piece_bytes)


def test_a_value_has_the_bytes_of_all_its_tensors_and_is_pinned_if_it_may_live_on_the_device_only() -> None:
    spec = TensorSpec(shape=(3,), dtype="float32")
    value = Value(name="v", tensors={"a": spec, "b": spec}, tiers=(Tier.DEVICE,))
    assert value.nbytes == 24
    assert value.pinned
    assert not Value(name="v", tensors={"a": spec}, tiers=(Tier.HOST,)).pinned


# Refusals


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="plan 'p' has two Values named 'v'"):
        plan_of({"v": IMMUTABLE}).value(Value(name="v", tensors={}))


def test_two_stages_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="plan 'p' has two stages named 'a'"):
        plan_of({"v": ORDERED}, stage("a", writes=("v",)), stage("a", reads=("v",)))


@pytest.mark.parametrize(
    "needs",
    [
        {"reads": ("w",)},
        {"writes": ("w",)},
        {"updates": ("w",)},
        {"streams": (Stream(values=("v", "w")),)},
    ],
)
def test_a_stage_that_uses_a_value_nobody_declared_is_refused_when_it_is_added(needs: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="stage 'a' uses a Value 'w' that plan 'p' does not declare"):
        plan_of({"v": IMMUTABLE}, stage("a", **needs))


def test_a_refused_stage_is_not_in_the_plan() -> None:
    plan = plan_of({})
    with pytest.raises(PlanError):
        plan.add(stage("a", reads=("w",)))
    assert plan.stages == {}


def test_a_cycle_is_refused_and_its_stages_are_named() -> None:
    plan = plan_of(
        {"x": IMMUTABLE, "y": IMMUTABLE, "z": IMMUTABLE, "other": IMMUTABLE},
        stage("outside", writes=("other",)),
        stage("a", reads=("z", "other"), writes=("x",)),
        stage("b", reads=("x",), writes=("y",)),
        stage("c", reads=("y",), writes=("z",)),
    )
    with pytest.raises(PlanError, match="plan 'p' has a cycle: ") as raised:
        plan.ordered()
    named = str(raised.value).split("cycle: ")[1].split(";")[0].split(" -> ")
    assert named[0] == named[-1]
    assert "a b c" in " ".join(named[:-1] * 2)


def test_an_immutable_value_with_two_writers_is_refused_and_both_are_named() -> None:
    plan = plan_of({"v": IMMUTABLE}, stage("a", writes=("v",)), stage("b", writes=("v",)))
    with pytest.raises(PlanError, match="Value 'v' is immutable but is written by a and b"):
        plan.ordered()


def test_a_stream_that_updates_counts_as_a_writer() -> None:
    stream = Stream(values=("v",), updates=True)
    plan = plan_of({"v": IMMUTABLE}, stage("a", writes=("v",)), stage("b", streams=(stream,)))
    with pytest.raises(PlanError, match="immutable but is written by a and b"):
        plan.ordered()


@pytest.mark.parametrize("kind", list(ValueKind))
def test_a_value_that_is_read_but_never_written_is_refused(kind: ValueKind) -> None:
    with pytest.raises(PlanError, match="stage 'a' reads 'v', which no stage of plan 'p' writes"):
        plan_of({"v": kind}, stage("a", reads=("v",))).ordered()


@pytest.mark.parametrize("kind", [ACCUMULATOR, ORDERED])
def test_what_changes_in_program_order_can_not_be_read_before_its_first_change(kind: ValueKind) -> None:
    plan = plan_of({"v": kind}, stage("a", reads=("v",)), stage("b", updates=("v",)))
    with pytest.raises(PlanError, match="stage 'a' reads 'v' before any stage has written it"):
        plan.ordered()


def test_an_accumulator_that_is_read_before_its_last_update_is_refused_and_the_update_is_named() -> None:
    plan = plan_of(
        {"v": ACCUMULATOR},
        stage("a", updates=("v",)),
        stage("b", updates=("v",)),
        stage("early", reads=("v",)),
        stage("late", updates=("v",)),
    )
    with pytest.raises(PlanError, match="stage 'early' reads accumulator 'v' before 'late' updates it"):
        plan.ordered()


def test_an_ordered_value_may_be_read_between_its_changes() -> None:
    plan = plan_of({"v": ORDERED}, stage("a", updates=("v",)), stage("b", reads=("v",)), stage("c", updates=("v",)))
    assert order(plan) == ["a", "b", "c"]


def test_a_plan_error_is_an_error_of_usage() -> None:
    assert issubclass(PlanError, UsageError)
    assert PlanError("").exit_code == 2


# Order


def test_stages_that_are_ready_come_in_the_order_in_which_they_were_added() -> None:
    names = ["m", "c", "z", "a", "k", "b"]
    plan = plan_of(dict.fromkeys(names, IMMUTABLE), *(stage(name, writes=(name,)) for name in names))
    assert order(plan) == names


def test_a_stage_waits_for_what_it_reads_and_nothing_else_overtakes() -> None:
    plan = plan_of(
        {"x": IMMUTABLE, "y": IMMUTABLE},
        stage("reader", reads=("x",)),
        stage("other", writes=("y",)),
        stage("writer", writes=("x",)),
        stage("last", reads=("y",)),
    )
    assert order(plan) == ["other", "writer", "reader", "last"]


def test_a_change_waits_for_the_readers_of_what_was_there_before() -> None:
    plan = plan_of(
        {"v": ORDERED, "x": IMMUTABLE},
        stage("first", updates=("v",)),
        stage("reader", reads=("v", "x")),
        stage("change", updates=("v",)),
        stage("x", writes=("x",)),
    )
    assert order(plan) == ["first", "x", "reader", "change"]


def test_the_graph_says_which_values_tie_two_stages() -> None:
    plan = plan_of(
        {"x": IMMUTABLE, "y": IMMUTABLE}, stage("a", writes=("x", "y")), stage("b", reads=("x",), updates=("y",))
    )
    plan.stages["b"] = stage("b", reads=("x", "y"))
    assert dict(plan.graph().edges) == {("a", "b"): {"values": ["x", "y"]}}


# Recipe keys


@st.composite
def histories(draw: st.DrawFn) -> tuple[Plan, dict[str, set[str]]]:
    """A random plan and, by name, the stages whose results each stage's result depends on."""
    rng = draw(st.randoms(use_true_random=False))
    kinds = {f"v{i}": rng.choice([IMMUTABLE, ORDERED]) for i in range(rng.randint(1, 6))}
    made_by: dict[str, str] = {}
    depends: dict[str, set[str]] = {}
    plan = plan_of(kinds)
    for index in range(draw(st.integers(2, 12))):
        name = f"s{index}"
        reads, changes = split_uses(rng, kinds, made_by)
        depends[name] = {name}.union(*(depends[made_by[v]] for v in (*reads, *changes) if v in made_by))
        made_by.update(dict.fromkeys(changes, name))
        plan.add(stage(name, config={"number": index}, reads=reads, updates=changes))
    return plan, depends


def split_uses(
    rng: random.Random, kinds: dict[str, ValueKind], made_by: dict[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads: list[str] = []
    changes: list[str] = []
    for name in rng.sample(list(kinds), rng.randint(1, min(3, len(kinds)))):
        born = name in made_by
        changing = not born or (kinds[name] is ORDERED and rng.random() < 0.5)
        (changes if changing else reads).append(name)
    return tuple(reads), tuple(changes)


@given(data=st.data(), history=histories())
@settings(max_examples=80)
def test_a_changed_stage_changes_its_own_recipe_key_and_those_that_depend_on_it_and_no_other(
    data: st.DataObject, history: tuple[Plan, dict[str, set[str]]]
) -> None:
    plan, depends = history
    before = recipe_keys(plan.ordered(), "1")
    name = data.draw(st.sampled_from(list(plan.stages)))
    needs = plan.stages[name]
    plan.stages[name] = stage(name, config={"number": -1}, reads=needs.reads, updates=needs.updates)
    after = recipe_keys([plan.stages[item.name] for item in plan.ordered()], "1")
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {other for other, causes in depends.items() if name in causes}


@given(history=histories())
@settings(max_examples=20)
def test_another_version_of_the_code_changes_every_recipe_key(history: tuple[Plan, dict[str, set[str]]]) -> None:
    stages = history[0].ordered()
    before, after = recipe_keys(stages, "1"), recipe_keys(stages, "2")
    assert all(before[name] != after[name] for name in before)


def test_the_workspace_is_no_part_of_a_recipe_key() -> None:
    keys = [recipe_keys([stage("a", workspace_bytes=nbytes)], "1")["a"] for nbytes in (0, 100)]
    assert keys[0] == keys[1]


def test_a_digest_does_not_depend_on_the_order_of_a_dict_and_does_on_everything_else() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    different: list[object] = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": 1.0}, {"a": [1]}, {"a": None}, ["a", 1]]
    assert len({digest(item) for item in different}) == len(different)
