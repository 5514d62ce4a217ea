"""Outputs that a person asks for never take the place of each other, of the plan, or of what a run directory holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.outputs import Outputs


def check(run: str, **paths: str) -> None:
    Outputs(**paths).check(plan="plan.py", run=Path(run))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.py").write_text("")
    Path("run").mkdir()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"trace": "a", "report": "./a"}, "--report names './a', which is --trace's file"),
        ({"trace": "a", "gradients": "a"}, "--save-gradients names 'a', which is --trace's file"),
        ({"trace": "plan.py"}, "--trace names 'plan.py', which is the plan's file"),
        ({"trace": "run/journal.msgpack"}, "which is in the run directory run; name a place outside"),
        ({"report": "run/plan.py"}, "which is in the run directory run; name a place outside"),
        ({"trace": "a" * 201}, "a name of more than 200 bytes"),
    ],
)
def test_an_output_in_the_place_of_something_else_is_refused(names: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check("run", **names)
    assert message in str(caught.value)


def test_a_run_that_is_not_there_yet_is_no_place_for_an_output() -> None:
    with pytest.raises(UsageError, match=r"which is in the run directory new"):
        check("new", trace="new")


def test_a_link_is_not_followed() -> None:
    Path("link").symlink_to("plan.py")
    with pytest.raises(UsageError, match=r"it is no regular file"):
        check("run", trace="link")


def test_outputs_of_their_own_are_fine() -> None:
    check("run", trace="t.json", report="r.html", gradients="g.safetensors")


def test_what_a_resume_asks_for_goes_where_it_says_and_the_rest_where_the_run_said(tmp_path: Path) -> None:
    asked = Outputs(trace="t.json", gradients="g.safetensors")
    assert Outputs().over(asked) == asked
    assert Outputs(trace="new.json").over(asked) == Outputs(trace=f"{tmp_path}/new.json", gradients="g.safetensors")
