"""Recipe keys of own stages: they follow what decides a result, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.authoring import source_digest
from engine.plan import Plan
from engine.recipe import plan_keys, recipe_keys
from tests.own_stages import (
    write_and_load,
)

LoadPlan = Callable[..., Plan]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadPlan:
    """See `write_and_load`; what loading adds to the import path goes again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    return partial(write_and_load, tmp_path)


BASE = """
@stage(writes=SPEC, workspace_bytes=0)
def scaled(source, factor: float = 2.0):
    # a comment
    return source * factor * helper()
def helper():
    return SCALE
SCALE = 1.0
"""


def key_of(load: LoadPlan, top: str, body: str = "scaled(plan, make(plan))") -> str:
    plan = load(body, top=top)
    return recipe_keys(plan.ordered(), "1")["scaled"]


CHANGES = {
    "the function": (BASE.replace("source * factor", "factor + source"), None),
    "a default": (BASE.replace("= 2.0", "= 3.0"), None),
    "a function that it calls": (BASE.replace("return SCALE", "return SCALE + 0"), None),
    "data of the module that it uses": (BASE.replace("SCALE = 1.0", "SCALE = 1.5"), None),
    "its configuration": (BASE, "scaled(plan, make(plan), factor=4.0)"),
    "the configuration of what it reads": (BASE, "scaled(plan, make(plan, seed=8))"),
    "the size of what it writes": (BASE.replace("writes=SPEC", "writes=TensorSpec(shape=(4,), dtype='float32')"), None),
}

NO_CHANGES = {
    "the line": ("\n\n\n" + BASE, "\n\nscaled(plan, make(plan))"),
    "a comment": (BASE.replace("# a comment", "# another"), None),
    "the layout": (BASE.replace("source * factor * helper()", "(source *\n  factor * helper())"), None),
    "the bytes that were declared": (BASE.replace("workspace_bytes=0", "workspace_bytes=64"), None),
    "a default that is spelled out": (BASE, "scaled(plan, make(plan), factor=2.0)"),
    "data that it does not use": (BASE + "OTHER = 3\n", None),
}


@pytest.mark.parametrize(("top", "body"), CHANGES.values(), ids=CHANGES)
def test_a_recipe_key_changes_with_what_decides_the_result(top: str, body: str | None, load: LoadPlan) -> None:
    before = key_of(load, BASE)
    assert key_of(load, top, body or "scaled(plan, make(plan))") != before


@pytest.mark.parametrize(("top", "body"), NO_CHANGES.values(), ids=NO_CHANGES)
def test_a_recipe_key_does_not_change_with_what_decides_nothing(top: str, body: str | None, load: LoadPlan) -> None:
    before = key_of(load, BASE)
    assert key_of(load, top, body or "scaled(plan, make(plan))") == before


def test_a_fingerprint_does_not_know_lines(load: LoadPlan) -> None:
    plans = [load(f"{before}\nuse(plan, make(plan), make(plan))") for before in ("", "pass\n\n")]
    assert plans[0].stages["use"].origin != plans[1].stages["use"].origin
    assert plan_keys(plans[0]) == plan_keys(plans[1])


def test_what_a_closure_holds_counts_as_source() -> None:
    def scaler(factor: float) -> Callable[[float], float]:
        return lambda number: number * factor

    assert source_digest(scaler(1.0)) == source_digest(scaler(1.0))
    assert source_digest(scaler(1.0)) != source_digest(scaler(2.0))


def test_a_function_without_source_counts_by_its_compiled_form() -> None:
    def compiled(text: str) -> Any:
        names: dict[str, Any] = {}
        exec(f"def f(x):\n    return {text}", names)
        return names["f"]

    assert source_digest(compiled("x + 1")) == source_digest(compiled("x + 1"))
    assert source_digest(compiled("x + 1")) != source_digest(compiled("x + 2"))
    assert source_digest(compiled("x in {'a', 'b'}")) == source_digest(compiled("x in {'b', 'a'}"))
