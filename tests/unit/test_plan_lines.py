"""Mistakes in a plan file are told with their line: when it is built, put in order, planned and run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.budget import Budget
from engine.errors import DoesNotFitError, PlanError, StageFailedError
from engine.plan import Plan
from engine.planner import forecast
from tests.own_stages import (
    CPU,
    marked_line,
    run,
    write_and_load,
)

LoadPlan = Callable[..., Plan]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadPlan:
    """See `write_and_load`; what loading adds to the import path goes again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return partial(write_and_load, tmp_path)


BUILDING = {
    "a first argument that is no plan": (
        "make(3)  # here",
        "stage function make takes the plan first, as in make(plan, ...), not int; make.function is the plain function",
    ),
    "no plan at all": (
        "make(seed=3)  # here",
        "stage function make takes the plan first, as in make(plan, ...), not NoneType; make.function is the plain "
        "function",
    ),
    "a missing argument": (
        "use(plan, make(plan))  # here",
        "stage function use can't be called like this: missing a required argument: 'right'; its call is "
        "use(plan, left, right)",
    ),
    "an unknown argument": (
        "make(plan, sead=1)  # here",
        "stage function make can't be called like this: got an unexpected keyword argument 'sead'; its call is "
        "make(plan, seed: int = 0)",
    ),
    "an argument that is neither a Value nor data": (
        "make(plan, seed={1, 2})  # here",
        "stage function make got seed={{1, 2}}, which is neither a Value nor plain data (numbers, text, lists, dicts "
        "with text keys): only plain data goes into a recipe, not set: {{1, 2}}",
    ),
    "a Value of another plan": (
        "other = make(Plan(name='other'))\nuse(plan, make(plan), other)  # here",
        "stage function use got Value 'make/out', made at mine.py line {before}, which is not of plan 'p'; pass the "
        "Values that calls with this plan returned",
    ),
    "a name that is taken": (
        "make(plan)\nmake(plan, name='make')  # here",
        "plan 'p' has two Values named 'make/out'; give each a name of its own",
    ),
    "a name that can't be a path": (
        "make(plan, name='two words')  # here",
        "Value 'two words/out' can't go to disk by that name; use letters, digits and _ . + - /",
    ),
    "a Value that is written once, changed in place": (
        "change(plan, make(plan), make(plan))  # here",
        "stage function change changes 'total' in place, but Value 'make/out' is written once; make one that may "
        "change with plan.accumulator(name, spec) or plan.variable(name, spec)",
    ),
    "a number changed in place": (
        "change(plan, 3, make(plan))  # here",
        "stage function change changes 'total' in place, so it needs a Value there, not 3",
    ),
    "a Value that is read and changed at once": (
        "total = plan.accumulator('total', SPEC)\nchange(plan, total, total)  # here",
        "stage function change got Value 'total' for 'total', which it changes in place, and for another parameter",
    ),
    "a Value that is streamed only": (
        "from engine import Tier\nfar = plan.value(Value(name='far', tensors={'t': SPEC}, tiers=(Tier.DISK,)))\n"
        "use(plan, far, far)  # here",
        "stage function use got Value 'far', which never is on the device as a whole; only a Stage with a Stream can "
        "use it",
    ),
    "two Values of one name": (
        "plan.accumulator('total', SPEC)\nplan.variable('total', SPEC)  # here",
        "plan 'p' has two Values named 'total'; give each a name of its own",
    ),
    "a Value of no size": (
        "plan.accumulator('total', TensorSpec(shape=(2, 0), dtype='float32'))  # here",
        "Value 'total' has no tier, or a tensor without elements: "
        "{{'tensor': TensorSpec(shape=(2, 0), dtype='float32')}}",
    ),
    "a size that is not known": (
        "plan.accumulator('total', TensorSpec(shape=(2, None), dtype='float32'))  # here",
        "shape=(2, None): every size must be a whole number that is known before the run",
    ),
    "a Value that nobody declared": (
        "plan.accumulator('total', SPEC)\nplan.find('totl')  # here",
        "plan 'p' has no Value 'totl'; there are total",
    ),
    "a stage that uses what nobody declared": (
        "plan.add(Stage(name='s', kind='s', run=print, reads=('v',)))  # here",
        "stage 's' uses a Value 'v' that plan 'p' does not declare",
    ),
    "two stages of one name": (
        "for _ in range(2):\n    plan.add(Stage(name='s', kind='s', run=print))  # here",
        "plan 'p' has two stages named 's'; give each a name of its own",
    ),
    "negative workspace": (
        "plan.add(Stage(name='s', kind='s', run=print, workspace_bytes=-1))  # here",
        "stage 's' has workspace_bytes=-1; give a whole number of bytes, 0 or more",
    ),
    "negative cost": (
        "Cost(flops=-1.0)  # here",
        "flops=-1.0 of a cost must be a finite number of at least 0",
    ),
}


@pytest.mark.parametrize(("body", "message"), BUILDING.values(), ids=BUILDING)
def test_a_mistake_in_a_plan_function_is_told_with_its_line(
    body: str, message: str, load: LoadPlan, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as raised:
        load(body)
    line = marked_line(tmp_path / "mine.py")
    assert str(raised.value) == f"{message.format(before=line - 1)} (mine.py line {line})"


SIZES = {
    "a size that is no size": (
        "writes=lambda count: (count, 2)",
        "has no size for what it writes: 'out' is (3, 2); writes gives a TensorSpec(shape=(...), dtype=\"...\"), or a "
        "dict of them",
    ),
    "a size function that fails": (
        "writes=lambda count: SPEC.shapes",
        "has no size for what it writes: its function failed with AttributeError: 'TensorSpec' object has no attribute "
        "'shapes'; it gets count",
    ),
    "a size function of what is not an argument": (
        "writes=lambda rows: SPEC",
        "has no size for what it writes: its function failed with TypeError: <lambda>() missing 1 required positional "
        "argument: 'rows'; it gets count",
    ),
    "a size that depends on what is not known": (
        "writes=lambda count: TensorSpec(shape=(count, None), dtype='float32')",
        "has no size for what it writes: shape=(3, None): every size must be a whole number that is known before the "
        "run",
    ),
    "an output without a name": (
        "writes={'the end': SPEC}",
        "calls an output 'the end'; outputs are fields of a named tuple, so use a plain name",
    ),
    "negative bytes": (
        "writes=SPEC, workspace_bytes=lambda count: -count",
        "has workspace_bytes=-3; give a whole number of bytes, 0 or more",
    ),
    "bytes that are no whole number": (
        "writes=SPEC, workspace_bytes=0.5",
        "has workspace_bytes=0.5; give a whole number of bytes, 0 or more",
    ),
    "a cost below zero": (
        "writes=SPEC, flops=-1",
        "has a cost that is no number: flops=-1.0 of a cost must be a finite number of at least 0",
    ),
}


@pytest.mark.parametrize(("settings", "message"), SIZES.values(), ids=SIZES)
def test_a_size_or_cost_that_is_none_is_told_with_the_line_of_the_call(
    settings: str, message: str, load: LoadPlan, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as raised:
        load("sized(plan, count=3)  # here", top=f"@stage({settings})\ndef sized(count): ...")
    assert str(raised.value) == f"stage function sized {message} (mine.py line {marked_line(tmp_path / 'mine.py')})"


DECORATING = {
    "updates of no parameter": (
        "@stage(updates='totl')  # here\ndef wrong(total): ...",
        "stage function wrong: updates names 'totl', which is none of its parameters (total)",
    ),
    "an output without a size": (
        "@stage  # here\ndef wrong(out): ...",
        "stage function wrong has a parameter 'out' but declares no output to fill; say its size with "
        'writes=TensorSpec(shape=(...), dtype="...")',
    ),
    "a parameter that names the stage": (
        "@stage  # here\ndef wrong(name): ...",
        "stage function wrong has a parameter 'name', which a call uses to name the stage; call it something else",
    ),
    "no name": (
        "stage(lambda: None)  # here",
        "@stage needs a function with a name, not <lambda>; define it with def",
    ),
}


@pytest.mark.parametrize(("top", "message"), DECORATING.values(), ids=DECORATING)
def test_a_mistake_in_a_decorator_is_told_with_its_line(top: str, message: str, load: LoadPlan, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as raised:
        load("make(plan)", top=top)
    assert str(raised.value) == f"{message} (mine.py line {marked_line(tmp_path / 'mine.py')})"


ORDERING = {
    "nobody writes it": (
        "total = plan.accumulator('total', SPEC)\nuse(plan, total, make(plan))  # here",
        "stage 'use' reads 'total', which no stage of plan 'p' writes",
    ),
    "read before its last change": (
        "total = plan.accumulator('total', SPEC)\npart = make(plan)\nchange(plan, total, part)\n"
        "use(plan, total, part)  # here\nchange(plan, total, part)",
        "stage 'use' reads accumulator 'total' before 'change-2' updates it",
    ),
    "read before its first change": (
        "total = plan.variable('total', SPEC)\nuse(plan, total, make(plan))  # here\nchange(plan, total, make(plan))",
        "stage 'use' reads 'total' before any stage has written it",
    ),
    "two writers": (
        "v = make(plan)\nplan.add(Stage(name='s', kind='s', run=print, writes=(v.name,)))  # here",
        "Value 'make/out' is immutable but is written by make and s",
    ),
}


@pytest.mark.parametrize(("body", "message"), ORDERING.values(), ids=ORDERING)
def test_a_mistake_in_the_order_is_told_with_the_line_of_the_stage(
    body: str, message: str, load: LoadPlan, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as raised:
        load(body).ordered()
    assert str(raised.value) == f"{message} (mine.py line {marked_line(tmp_path / 'mine.py')})"


def test_a_cycle_is_told_with_the_line_of_every_stage_in_it(load: LoadPlan, tmp_path: Path) -> None:
    plan = load("""
        x, y = (plan.value(Value(name=name, tensors={"t": SPEC})).name for name in "xy")
        plan.add(Stage(name="a", kind="s", run=print, reads=(y,), writes=(x,)))
        plan.add(Stage(name="b", kind="s", run=print, reads=(x,), writes=(y,)))  # here
    """)
    line = marked_line(tmp_path / "mine.py")
    with pytest.raises(PlanError) as raised:
        plan.ordered()
    assert str(raised.value) in (
        f"plan 'p' has a cycle: {first} -> {second} -> {first}; one of these stages reads what a later one writes "
        f"({first}: mine.py line {lines[first]}, {second}: mine.py line {lines[second]})"
        for lines in [{"a": line - 1, "b": line}]
        for first, second in ("ab", "ba")
    )


RUNNING = {
    "it raises": (
        "@stage\ndef wrong():\n    helper()\ndef helper():\n    raise ValueError('no such thing')  # here",
        "stage wrong failed: ValueError: no such thing",
    ),
    "an exit": (
        "@stage\ndef wrong():\n    raise SystemExit(3)  # here",
        "stage wrong failed: SystemExit: 3",
    ),
    "another shape": (
        "@stage(writes=SPEC)\ndef wrong():\n    import torch\n    return torch.zeros(3)",
        "stage wrong returned a float32 tensor of shape (3,), but declares a float32 tensor of shape (2, 2); "
        "make one of them like the other",
    ),
    "another dtype": (
        "@stage(writes={'a': SPEC, 'b': SPEC})\ndef wrong():\n    import torch\n"
        "    return torch.zeros(2, 2), torch.zeros(2, 2).double()",
        "stage wrong returned a float64 tensor of shape (2, 2) for 'b', but declares a float32 tensor of shape (2, 2); "
        "make one of them like the other",
    ),
    "another device": (
        "@stage(writes=SPEC)\ndef wrong():\n    import torch\n    return torch.zeros(2, 2, device='meta')",
        "stage wrong returned a tensor on meta, but runs on cpu; move it there",
    ),
    "no tensor": (
        "@stage(writes=SPEC)\ndef wrong():\n    return 3.5",
        "stage wrong returned float 3.5, but declares a float32 tensor of shape (2, 2); return a torch tensor",
    ),
    "nothing": (
        "@stage(writes=SPEC)\ndef wrong():\n    pass",
        "stage wrong returned a NoneType, but declares a float32 tensor of shape (2, 2); return a torch tensor",
    ),
    "too few outputs": (
        "@stage(writes={'a': SPEC, 'b': SPEC})\ndef wrong():\n    return (1,)",
        "stage wrong returned a tuple of 1, but it writes a, b: return one of each",
    ),
    "an output that was not declared": (
        "@stage(workspace_bytes=100)\ndef wrong():\n    import torch\n    return torch.zeros(2, 3)",
        "stage wrong returned a float32 tensor of shape (2, 3), but it declares nothing that it writes, so no bytes "
        'are planned; declare it with writes=TensorSpec(shape=(2, 3), dtype="float32"), or return nothing',
    ),
    "a result beside out": (
        "@stage(writes=SPEC)\ndef wrong(out):\n    return out",
        "stage wrong returned a float32 tensor of shape (2, 2); it has a parameter 'out', so it fills that and "
        "returns nothing",
    ),
    "a report of something else": (
        "@stage\ndef wrong(report):\n    report('x', {1})",
        "stage wrong reports 'x' as a set; report numbers, text, lists and dicts of them",
    ),
    "a report twice": (
        "@stage\ndef wrong(report):\n    report('x', 1)\n    report('x', 2)",
        "stage wrong reports 'x', which was reported before; use another name",
    ),
    "more than declared": (
        "@stage(writes=SPEC, workspace_bytes=10)\ndef wrong():\n    import torch\n    torch.zeros(100)\n"
        "    return torch.zeros(2, 2)",
        "stage wrong used 416 B (416 bytes) of the device, more than the 42 B (42 bytes) planned for it; the run was "
        "stopped; declare workspace_bytes=384 for it, or need less",
    ),
    "tensors that stay": (
        "KEPT = []\n@stage(workspace_bytes=400)\ndef wrong():\n    import torch\n    KEPT.append(torch.zeros(100))",
        "stage wrong keeps 400 B (400 bytes) of tensors alive after its end, which nothing is planned for; return them "
        "as outputs, and keep none in globals or caches",
    ),
}


@pytest.mark.parametrize(("top", "message"), RUNNING.values(), ids=RUNNING)
def test_a_stage_that_fails_is_told_with_the_line_that_failed_or_that_added_it(
    top: str, message: str, load: LoadPlan, tmp_path: Path
) -> None:
    called = "wrong(plan)" if "# here" in top else "wrong(plan)  # here"
    with pytest.raises(StageFailedError) as raised:
        run(load(called, top=top), tmp_path / "run")
    assert str(raised.value) == f"{message} (mine.py line {marked_line(tmp_path / 'mine.py')})"


def test_the_workspace_that_an_error_names_is_enough(load: LoadPlan, tmp_path: Path) -> None:
    top = RUNNING["more than declared"][0].replace("workspace_bytes=10", "workspace_bytes=384")
    assert run(load("wrong(plan)", top=top), tmp_path / "run").stage_peak_bytes == {"wrong": (416, 416)}


def test_a_value_that_is_only_read_may_not_be_changed_in_place(load: LoadPlan, tmp_path: Path) -> None:
    plan = load("wrong(plan, make(plan))  # here", top="@stage\ndef wrong(left):\n    left.add_(1)")
    with pytest.raises(StageFailedError) as raised:
        run(plan, tmp_path / "run")
    assert str(raised.value) == (
        "stage wrong changed make/out in place, which it only reads; change a copy, or name its parameter in updates= "
        f"(mine.py line {marked_line(tmp_path / 'mine.py')})"
    )


def test_a_plan_that_does_not_fit_for_a_stage_of_ones_own_names_its_line(load: LoadPlan, tmp_path: Path) -> None:
    plan = load("v = make(plan)\nuse(plan, v, v)  # here")
    with pytest.raises(DoesNotFitError) as raised:
        forecast(plan, Budget(device_bytes=40, host_bytes=1000, disk_bytes=1000), CPU)
    assert str(raised.value) == (
        "does not fit: stage use needs 48 B (48 bytes) on the device, the budget has 40 B "
        "(40 bytes); give --budget device=48 or more, or a smaller plan "
        f"(mine.py line {marked_line(tmp_path / 'mine.py')})"
    )


def test_a_line_is_named_where_the_plan_file_and_the_function_are_two_files(
    load: LoadPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(
        "from engine import stage\n\n\n@stage\ndef broken():\n    return undefined\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = load("from rewards_of_mine import broken\nbroken(plan)")
    with pytest.raises(
        StageFailedError, match=r"NameError: name 'undefined' is not defined \(rewards_of_mine.py line 6\)"
    ):
        run(plan, tmp_path / "run")
