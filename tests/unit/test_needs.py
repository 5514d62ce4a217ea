"""The tables of a plan's needs: streams by number are what its streams say one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from engine.budget import Tier
from engine.needs import needs_of, touches
from engine.plan import ALL_TIERS, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from tests.property.test_schedules import random_plans, touch


def pages(name: str, *, tiers: tuple[Tier, ...] = ALL_TIERS, provided: bool = False) -> Value:
    tensors = {"pages": TensorSpec(shape=(4, 8), dtype="uint8")}
    return Value(name=name, tensors=tensors, kind=ValueKind.ORDERED, tiers=tiers, provided=provided)


@given(plan=random_plans())
@settings(max_examples=50)
def test_the_columns_of_streams_are_what_each_stream_touches(plan: Plan) -> None:
    needs = needs_of(plan, plan.ordered())
    uses = needs.streams
    columns = zip(uses.stages, uses.values, uses.in_bytes, uses.out_bytes, uses.num_pieces, strict=True)
    one_by_one = [
        (number, needs.names.index(touched.value), touched.in_bytes, touched.out_bytes, touched.num_pieces)
        for number, stage in enumerate(needs.stages)
        for stream in stage.streams
        for touched in touches(plan, stream)
    ]
    assert [tuple(map(int, row)) for row in columns] == one_by_one
    assert needs.buffer_bytes.tolist() == [sum(map(plan.buffer_bytes, stage.streams)) for stage in needs.stages]


def test_a_stream_touches_the_pieces_it_names_in_every_pass_and_only_what_it_buffers_comes_in() -> None:
    plan = Plan(name="streams")
    for value in (pages("a"), pages("b"), pages("stays", tiers=(Tier.DEVICE,))):
        plan.value(value)
    some = Stream(values=("a", "b", "stays"), updates=True, passes=2, pieces=(1, 3, 4))
    assert [tuple(item) for item in touches(plan, some)] == [("a", 16, 16, 2), ("b", 48, 48, 6)]
    written = replace(some, buffered=False, pieces=())
    assert [tuple(item) for item in touches(plan, written)] == [("a", 0, 64, 8), ("b", 0, 64, 8)]
    assert plan.buffer_bytes(some) == 8
    assert plan.buffer_bytes(written) == plan.buffer_bytes(Stream(values=("stays",))) == 0
    plan.add(Stage(name="written", kind="work", run=touch, streams=(written,)))
    plan.add(Stage(name="some", kind="work", run=touch, streams=(some,)))
    assert needs_of(plan, plan.ordered()).buffer_bytes.tolist() == [0, 8]


def test_what_is_stored_may_be_on_the_disk_and_is_no_file_of_its_stage() -> None:
    assert pages("a").is_stored
    assert not pages("a", tiers=(Tier.DEVICE, Tier.HOST)).is_stored
    assert not pages("a", tiers=(Tier.DISK,), provided=True).is_stored
