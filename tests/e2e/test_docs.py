"""What the documentation shows is what happens: its examples run, its commands parse, its links lead somewhere.

A page is read from top to bottom in one folder of its own. ``python`` blocks run in one namespace; ``console`` blocks
hold commands after ``$`` and their output, which is not compared. A comment on the line before a block says more:

``<!-- file: NAME -->``  the block is also written to NAME, for the commands that follow
``<!-- exit: N -->``     its commands end with exit code N
``<!-- long -->``        its commands are parsed and not run: they take long, need a network or files of the reader
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.__main__ import _parser, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>[a-z]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)
LANGUAGES = {"", "python", "console", "json", "jsonl", "text"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page, with the line its text begins on and the comment before it."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The command lines of a ``console`` block."""
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix("$ ").strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            mark=match["mark"] or "",
            text=match["text"],
        )
        for match in BLOCK.finditer(text)
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def engine_commands(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of each ``engine`` command of a block."""
    for command in block.commands:
        words = shlex.split(command, comments=True)
        if words[:1] == ["engine"]:
            yield words[1:]


def exit_code_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


def run_python(block: Block, namespace: dict[str, object]) -> None:
    padding = "\n" * (block.line - 1)  # so that a traceback has the page's line
    exec(compile(padding + block.text, str(block.page), "exec", dont_inherit=True), namespace)


def run_console(block: Block) -> None:
    expected = int(block.mark.removeprefix("exit: ")) if block.mark.startswith("exit: ") else 0
    for arguments in engine_commands(block):
        code = exit_code_of(arguments)
        assert code == expected, f"{name_of(block.page)} line {block.line}: engine {shlex.join(arguments)} gave {code}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    namespace: dict[str, object] = {"__name__": "example"}
    for block in blocks_of(page):
        if block.mark == "long":
            continue
        if block.mark.startswith("file: "):
            Path(block.mark.removeprefix("file: ")).write_text(block.text)
        if block.language == "python":
            run_python(block, namespace)
        elif block.language == "console":
            run_console(block)


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
def test_every_block_is_of_a_known_language(page: Path) -> None:
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= LANGUAGES
    assert 2 * len(blocks) == len(re.findall(r"^```", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for match in LINK.finditer(page.read_text()):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        file = Path(os.path.normpath(page.parent / target)) if target else page
        assert file.exists(), f"{name_of(page)} links to {match['target']}"
        if anchor:
            assert anchor in anchors_of(file), f"{name_of(page)} links to {match['target']}"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    titles = (match["title"].lower().replace("`", "") for match in HEADING.finditer(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
