"""What the documentation shows is what happens: its examples run, its commands parse, its links lead somewhere.

A page is read from top to bottom in one folder of its own. ``python`` blocks run in one namespace; ``console`` blocks
hold commands after ``$`` and their output, which is not compared unless a mark says so. Marks are comments on the line
before a block, several joined by commas:

``<!-- file: NAME -->``  the block is also written to NAME, for the commands that follow
``<!-- exit: N -->``     its commands end with exit code N
``<!-- long -->``        its commands are parsed and not run: they take long, need a network or files of the reader
``<!-- same -->``        what its commands print is what the block shows, letter for letter
``<!-- output -->``      the block is what the ``python`` block before it prints, letter for letter

``UPDATE_DOCS=1`` in the environment rewrites the blocks marked ``same`` or ``output`` instead of comparing them.

Links between pages, and to headings of pages, are followed. Links out of the project are held to a form (https, a host
of the list below) and not followed: tests use no network.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine.__main__ import _parser, main
from engine.loader import find_plan

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
COMMAND_LINE = DOCS / "reference" / "command-line.md"
SAMPLING = DOCS / "how-to" / "sample-and-train.md"
SETTINGS = DOCS / "reference" / "settings.md"

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>[^\s`]*)[^\n`]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
LANGUAGES = {"", "python", "console", "json", "jsonl", "text"}
DIRECTIVES = {"{toctree}", "{include}", "{eval-rst}"}
MARKS = ("file", "exit", "long", "same", "output")
HOSTS = {"arxiv.org", "docs.vllm.ai", "github.com", "huggingface.co", "ui.perfetto.dev", "verl.readthedocs.io"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page, with the line its text begins on and the marks before it."""

    page: Path
    line: int
    language: str
    marks: dict[str, str]
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)} line {self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines of a ``console`` block, as they are written."""
        joined = self.text.replace("\\\n", "\\\0")
        return [line.replace("\0", "\n") for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            marks=marks_in(match["mark"] or ""),
            text=match["text"],
        )
        for match in BLOCK.finditer(text)
    ]


def marks_in(comment: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in comment.split(",") if part.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def engine_arguments(command: str) -> list[str] | None:
    """Return the arguments of an ``engine`` command, None for a command of another program."""
    words = shlex.split(command.removeprefix("$ ").replace("\\\n", " "), comments=True)
    return words[1:] if words[:1] == ["engine"] else None


def engine_commands(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of each ``engine`` command of a block."""
    yield from (found for command in block.commands if (found := engine_arguments(command)) is not None)


def exit_code_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def run_python(block: Block, namespace: dict[str, object]) -> None:
    padding = "\n" * (block.line - 1)  # so that a traceback has the page's line
    exec(compile(padding + block.text, str(block.page), "exec", dont_inherit=True), namespace)


def run_console(block: Block, printed: Callable[[], str]) -> None:
    """Run a block's commands; ``printed`` returns what was printed since it was called last."""
    expected = int(block.marks.get("exit", "0"))
    shown = ""
    for command in block.commands:
        arguments = engine_arguments(command)
        if arguments is not None:
            printed()
            code = exit_code_of(arguments)
            assert code == expected, f"{block.place}: {command} gave {code}"
            shown += f"{command}\n{printed()}"
    if "same" in block.marks:
        compare(block, shown)


def compare(block: Block, shown: str) -> None:
    """Hold a block to what was printed, or write that into the page where this is asked for."""
    if os.environ.get("UPDATE_DOCS") and shown != block.text:
        fence = f"```{block.language}\n"
        before, after = (f"{fence}{text}```" for text in (block.text, shown))
        page = block.page.read_text()
        assert page.count(before) == 1, f"{block.place}: several blocks have this text; which one is to be rewritten?"
        block.page.write_text(page.replace(before, after))
        return
    assert block.text == shown, f"{block.place} is not what is printed; UPDATE_DOCS=1 rewrites it"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace: dict[str, object] = {"__name__": "example"}
    output = ""
    for block in blocks_of(page):
        if "long" in block.marks:
            continue
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.text)
        if block.language == "python":
            capsys.readouterr()
            run_python(block, namespace)
            output = capsys.readouterr().out
        elif block.language == "console":
            run_console(block, lambda: "".join(capsys.readouterr()))
        elif "output" in block.marks:
            compare(block, output)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_parses(page: Path) -> None:
    for block in blocks_of(page):
        for arguments in engine_commands(block):
            if not {"-h", "--help"} & set(arguments):
                _parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_is_in_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language_and_every_mark_is_known(page: Path) -> None:
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= LANGUAGES | DIRECTIVES
    assert 2 * len(blocks) == len(re.findall(r"^```", page.read_text(), re.MULTILINE))
    assert {mark for block in blocks for mark in block.marks} <= set(MARKS)
    assert "@@" not in page.read_text()  # a gap that was to be filled


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = Path(os.path.normpath(page.parent / path)) if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors_of(file), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_out_of_the_project_are_https_to_a_host_of_the_list(page: Path) -> None:
    for target in links_of(page):
        if "://" in target:
            address = urlsplit(target)
            assert address.scheme == "https", f"{name_of(page)} links to {target}"
            assert address.netloc in HOSTS, f"{name_of(page)} links to {target}"


def links_of(page: Path) -> list[str]:
    """Return the targets of a page's links, those in blocks left out."""
    return [match["target"] for match in LINK.finditer(BLOCK.sub("", page.read_text()))]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    titles = (match["title"].lower().replace("`", "") for match in HEADING.finditer(BLOCK.sub("", page.read_text())))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_the_site_builds_without_warnings_and_has_every_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*build, str(DOCS), str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        if page.is_relative_to(DOCS):
            assert (tmp_path / "html" / page.relative_to(DOCS)).with_suffix(".html").is_file(), name_of(page)


def shipped_plans() -> list[str]:
    return [path.stem for path in sorted((ROOT / "plans").glob("*.py")) if "-> Plan:" in path.read_text()]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    (action,) = (item for item in _parser()._actions if isinstance(item, argparse._SubParsersAction))
    return dict(action.choices)


def test_the_command_line_page_names_the_flags_of_every_command_and_no_other() -> None:
    usage = blocks_of(COMMAND_LINE)[0].text
    documented: dict[str, set[str]] = {}
    command = ""
    for line in usage.splitlines():
        if line.startswith("engine "):
            command = line.split()[1]
        documented.setdefault(command, set()).update(re.findall(r"--[a-z-]+", line))
    real = {
        name: {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}
        for name, parser in subparsers().items()
    }
    assert documented == real
    rows = set(re.findall(r"^\| `(--[a-z-]+)", COMMAND_LINE.read_text(), re.MULTILINE))
    assert rows == set().union(*real.values())


def test_the_command_line_page_names_every_key_of_the_json_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = COMMAND_LINE.read_text()
    (sampling,) = (block for block in blocks_of(SAMPLING) if "file" in block.marks)
    Path("sampling.py").write_text(sampling.text)
    small = ["tiny_dense", "--json", "--set", "prompt_tokens=80"]
    for arguments in (
        ["simulate", *small],
        ["execute", *small],
        ["audit", *small, "--set", "dtype=float64"],
        ["execute", "sampling.py", "--json", "--set", "epochs_per_step=1"],
    ):
        assert main(arguments) == 0
        printed = json.loads(capsys.readouterr().out)
        keys = [*printed, *printed.get("metrics", {})]
        assert [key for key in keys if f"`{key}`" not in text] == [], arguments


@pytest.mark.parametrize("plan", shipped_plans())
def test_the_settings_page_names_every_shipped_plan_and_its_settings(plan: str) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", SETTINGS.read_text()))))
    assert {plan, *inspect.signature(find_plan(plan).build).parameters} - named == set()
