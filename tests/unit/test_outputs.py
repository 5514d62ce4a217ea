"""Outputs that a person asks for never take the place of each other, of the plan, or of what a run directory holds."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from engine.commands import _check_pictures
from engine.errors import UsageError


def asked(**names: str | None) -> argparse.Namespace:
    return argparse.Namespace(**{"trace": None, "report": None, "save_gradients": None, "plan": "plan.py", **names})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.py").write_text("")
    Path("run").mkdir()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"trace": "a", "report": "./a"}, "--report names './a', which is --trace's file"),
        ({"trace": "a", "save_gradients": "a"}, "--save-gradients names 'a', which is --trace's file"),
        ({"trace": "plan.py"}, "--trace names 'plan.py', which is the plan's file"),
        ({"trace": "run/journal.msgpack"}, "which is in the run directory run; name a place outside"),
        ({"report": "run/plan.py"}, "which is in the run directory run; name a place outside"),
        ({"trace": "a" * 201}, "a name of more than 200 bytes"),
    ],
)
def test_an_output_in_the_place_of_something_else_is_refused(names: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        _check_pictures(asked(**names), Path("run"))
    assert message in str(caught.value)


def test_a_run_that_is_not_there_yet_is_no_place_for_an_output() -> None:
    with pytest.raises(UsageError, match=r"which is in the run directory new"):
        _check_pictures(asked(trace="new"), Path("new"))


def test_a_link_is_not_followed() -> None:
    Path("link").symlink_to("plan.py")
    with pytest.raises(UsageError, match=r"it is no regular file"):
        _check_pictures(asked(trace="link"), Path("run"))


def test_outputs_of_their_own_are_fine() -> None:
    _check_pictures(asked(trace="t.json", report="r.html", save_gradients="g.safetensors"), Path("run"))
