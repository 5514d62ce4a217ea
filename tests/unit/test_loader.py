"""From a file and --set to a plan: what is found, what is refused, and what the refusal says."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UsageError
from engine.loader import PlanFile, find_plan, parse_settings
from engine.plan import Plan

WriteFile = Callable[..., str]

ANNOTATED = """
    from __future__ import annotations
    from pathlib import Path
    from typing import Literal, Optional, Union
    from engine import Plan

    def plan(
        whole: int = 1,
        number: float = 0.5,
        flag: bool = False,
        mode: Literal["fast", "exact"] = "exact",
        width: Literal[1, 2] = 1,
        maybe: Optional[int] = None,
        either: int | str | None = None,
        choice: Literal["a", "b"] | None = None,
        folder: Path = Path("."),
        text: str = "",
        bare=3,
        many: list[int] = [],
    ) -> Plan:
        return Plan(name="annotated", settings=dict(locals()))
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFile:
    """Write a plan file and return its path; what loading adds to the import path goes again."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_file(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip("\n") + "\n")
        return str(tmp_path / name)

    return write_file


def refusal(name: str, settings: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as raised:
        find_plan(name).plan(settings or {})
    return str(raised.value)


# Files


def test_the_function_that_returns_a_plan_is_found_whatever_its_name(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def helper() -> int:
        return 1

    def anything(size: int = 3) -> Plan:
        return Plan(name=f"size {size}")
    """)
    file = find_plan(path)
    assert (file.name, file.path) == ("mine", Path(path))
    assert file.plan({}).name == "size 3"
    assert file.plan({"size": "5"}).name == "size 5"


@pytest.mark.parametrize("annotation", ["Plan", '"Plan"', "engine.Plan", '"engine.Plan"'])
def test_an_annotation_is_understood_in_every_spelling(annotation: str, write: WriteFile) -> None:
    path = write(f"""
    import engine
    from engine import Plan

    def build() -> {annotation}:
        return Plan(name="x")
    """)
    assert find_plan(path).plan({}).name == "x"


def test_without_an_annotation_the_function_named_plan_is_taken(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def other():
        return None

    def plan():
        return Plan(name="by name")
    """)
    assert find_plan(path).plan({}).name == "by name"


def test_an_imported_plan_function_and_a_private_one_do_not_count(write: WriteFile) -> None:
    path = write("""
    from engine import Plan
    from engine.loader import find_plan

    def _part() -> Plan:
        return Plan(name="part")

    def whole() -> Plan:
        return _part()
    """)
    assert find_plan(path).plan({}).name == "part"


def test_names_for_type_checkers_only_do_not_keep_a_plan_from_loading(write: WriteFile) -> None:
    path = write("""
    from __future__ import annotations
    from typing import TYPE_CHECKING
    if TYPE_CHECKING:
        from collections.abc import Sequence
        from engine import Plan

    def build(names: Sequence[str] = (), size: int = 2) -> Plan:
        from engine import Plan
        return Plan(name=f"size {size}")
    """)
    assert find_plan(path).plan({}).name == "size 2"


def test_a_file_without_a_plan_function_is_refused(write: WriteFile) -> None:
    path = write("x = 1")
    assert refusal(path) == f"{path} must have one function that returns a Plan ('-> Plan'); it has none"


def test_a_file_with_two_plan_functions_is_refused_and_both_are_named(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def one() -> Plan:
        return Plan(name="1")

    def two() -> Plan:
        return Plan(name="2")
    """)
    assert refusal(path).endswith("must have one function that returns a Plan ('-> Plan'); it has one, two")


def test_a_syntax_error_is_told_with_its_line(write: WriteFile) -> None:
    path = write("x = 1\ny = 2\ndef broken(:\n    pass")
    text = refusal(path)
    assert f"plan {path} can't be imported: SyntaxError" in text
    assert "line 3" in text


def test_an_exception_while_importing_is_told_with_the_line_in_the_file(write: WriteFile) -> None:
    path = write("""
    import json

    value = json.loads("{")
    """)
    text = refusal(path)
    assert f"plan {path} can't be imported: JSONDecodeError" in text
    assert text.endswith("(line 3)")


def test_an_import_that_fails_is_told(write: WriteFile) -> None:
    assert "ModuleNotFoundError: No module named 'no_such_module' (line 1)" in refusal(write("import no_such_module"))


def test_an_exception_in_the_plan_function_is_told_with_the_line_in_the_file(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def build(size: int = 0) -> Plan:
        return Plan(name=str(1 // size))
    """)
    text = refusal(path)
    assert "ZeroDivisionError" in text
    assert str(path) in text
    assert "line 4" in text


def test_an_error_of_usage_in_the_plan_function_is_passed_on_as_it_is(write: WriteFile) -> None:
    path = write("""
    from engine import Plan
    from engine.errors import UsageError

    def build() -> Plan:
        raise UsageError("no rollouts given")
    """)
    assert refusal(path) == "no rollouts given"


def test_a_function_that_returns_something_else_is_refused(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def build() -> Plan:
        return 3
    """)
    assert refusal(path) == f"{path}: build() returned int, not a Plan"


def test_an_argument_without_default_has_to_be_set(write: WriteFile) -> None:
    path = write("""
    from engine import Plan

    def build(policy: str) -> Plan:
        return Plan(name=policy)
    """)
    assert "build() can't be called" in refusal(path)
    assert "'policy'" in refusal(path)
    assert find_plan(path).plan({"policy": "x"}).name == "x"


@pytest.mark.parametrize("name", ["mine.txt", "mine"])
def test_a_file_that_is_no_python_is_refused(name: str, write: WriteFile) -> None:
    assert "is not a Python file; a plan ends in .py" in refusal(write("x = 1", name))


def test_two_files_of_one_name_are_two_plans(write: WriteFile, tmp_path: Path) -> None:
    text = 'from engine import Plan\ndef build() -> Plan:\n    return Plan(name="{}")'
    first = write(text.format("first"))
    (tmp_path / "other").mkdir()
    second = write(text.format("second"), "other/mine.py")
    assert [find_plan(path).plan({}).name for path in (first, second, first)] == ["first", "second", "first"]


def test_a_plan_may_import_from_its_own_folder(write: WriteFile) -> None:
    write("NAME = 'neighbour'", "neighbour_of_mine.py")
    path = write("""
    from engine import Plan
    from neighbour_of_mine import NAME

    def build() -> Plan:
        return Plan(name=NAME)
    """)
    assert find_plan(path).plan({}).name == "neighbour"


# Shipped plans


def test_a_shipped_plan_is_found_by_name_where_no_such_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = find_plan("tiny_dense")
    assert (file.name, file.build.__name__) == ("tiny_dense", "tiny_dense")


def test_a_file_of_that_name_wins(write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write('from engine import Plan\ndef build() -> Plan:\n    return Plan(name="own")', "tiny_dense.py")
    assert find_plan("tiny_dense.py").plan({}).name == "own"


@pytest.mark.parametrize("name", ["layers", "response_tokens"])
def test_a_tiny_model_of_nothing_is_refused_with_the_setting_to_blame(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}=0 must be at least 1"):
        find_plan("tiny_dense").plan({name: "0"})


@pytest.mark.parametrize("name", ["nothing", "no/such.py", "../plans/tiny_dense", ""])
def test_an_unknown_plan_is_refused_with_the_shipped_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal(name)
    assert f"no plan file {name!r} here, and no shipped plan of that name; shipped are " in text
    assert {"from_rollouts", "quickstart", "tiny_dense"} <= set(text.split("shipped are ")[1].split(", "))


# Settings


@pytest.fixture
def annotated(write: WriteFile) -> PlanFile:
    return find_plan(write(ANNOTATED))


def setting(file: PlanFile, name: str, text: str) -> Any:
    plan: Plan = file.plan({name: text})
    return plan.settings[name]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("whole", "-3", -3),
        ("number", "1e-3", 0.001),
        ("number", "2", 2.0),
        ("flag", "true", True),
        ("flag", "False", False),
        ("mode", "fast", "fast"),
        ("width", "2", 2),
        ("maybe", "7", 7),
        ("maybe", "none", None),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("either", "None", None),
        ("choice", "b", "b"),
        ("choice", "none", None),
        ("folder", "/tmp/x", Path("/tmp/x")),
        ("text", "a=b, c", "a=b, c"),
        ("text", "", ""),
        ("bare", "4", "4"),
    ],
)
def test_a_setting_is_read_by_its_annotation(name: str, text: str, value: object, annotated: PlanFile) -> None:
    found = setting(annotated, name, text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("whole", "1.5", "--set whole='1.5': not a whole number"),
        ("whole", "", "--set whole='': not a whole number"),
        ("whole", "none", "--set whole='none': not a whole number"),
        ("number", "much", "--set number='much': not a number"),
        ("flag", "1", "--set flag='1': write true or false"),
        ("flag", "yes", "--set flag='yes': write true or false"),
        ("mode", "slow", "--set mode='slow': choose one of fast, exact"),
        ("width", "3", "--set width='3': choose one of 1, 2"),
        ("maybe", "x", "--set maybe='x': not a whole number"),
        ("choice", "c", "--set choice='c': choose one of a, b"),
        ("many", "1,2", "--set many: an argument of type list[int] can't be set from the command line"),
    ],
)
def test_a_setting_that_its_annotation_does_not_allow_is_refused(
    name: str, text: str, message: str, annotated: PlanFile
) -> None:
    with pytest.raises(UsageError) as raised:
        annotated.plan({name: text})
    assert str(raised.value) == message


def test_an_unknown_setting_is_refused_with_the_known_ones(annotated: PlanFile) -> None:
    with pytest.raises(UsageError, match="--set hole: plan mine has no such name; it knows whole, number, flag, mode"):
        annotated.plan({"hole": "1"})


def test_a_plan_without_arguments_says_that_it_knows_none(write: WriteFile) -> None:
    path = write('from engine import Plan\ndef build() -> Plan:\n    return Plan(name="x")')
    assert refusal(path, {"a": "1"}) == "--set a: plan mine has no such name; it knows none"


def test_settings_are_split_at_the_first_equals_sign() -> None:
    assert parse_settings(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize("item", ["a", "=1", "a b=1", "", "a-b=1"])
def test_a_setting_without_name_or_value_is_refused(item: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_settings([item])
    assert str(raised.value) == f"--set {item!r}: write name=value"


def test_a_setting_given_twice_is_refused_even_with_equal_values() -> None:
    with pytest.raises(UsageError, match="--set a is given twice: '1' and '1'"):
        parse_settings(["a=1", "b=2", "a=1"])


def test_whole_numbers_are_those_arguments_that_may_be_one_with_what_they_are_now(write: WriteFile) -> None:
    file = find_plan(write(ANNOTATED))
    assert file.whole_numbers({}) == {"whole": 1, "maybe": None, "either": None}
    assert file.whole_numbers({"whole": "7", "maybe": "3", "either": "text"}) == {
        "whole": 7, "maybe": 3, "either": None,
    }  # fmt: skip


def test_a_plan_file_says_with_what_it_is_there_to_be_measured_and_most_are_not() -> None:
    measured = find_plan("calibration").measured
    assert len(measured) > 1
    assert all(set(settings) <= set(find_plan("calibration").parameters) for settings in measured)
    assert list(find_plan("tiny_dense").measured) == []
