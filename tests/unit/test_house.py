"""The rules of the house: who may import whom, what stays free of torch, what a folder says about itself.

Each rule is held on every module that exists, found by walking the tree and parsing it, so that a new module needs no
entry here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What the modules of each package may import of ours.
MAY_IMPORT = {
    "engine": {"engine"},
    "models": {"models", "engine"},
    "stages": {"stages", "models", "engine"},
    "plans": {"plans", "stages", "models", "engine"},
}
TOP_LEVEL_FOLDERS = [*MAY_IMPORT, "docs", "tests"]

# All else of the engine can be read, tested and run on a laptop without torch: events in, instructions out.
WITH_TORCH = {"calibrate", "context", "device", "memory", "observers", "runtime", "streams", "tensors", "worker"}

# Imported where they are found, by code that says what to do where they are not.
OPTIONAL_IMPORTS = {"flash_attn", "fla", "torch_memory_saver"}

TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".cfg", ".yaml", ".yml", ".json", ".sh", ".html", ".jinja"}
NOT_OURS = {"build", "dist", "runs", "venv", "__pycache__"}
# A path of somebody's own machine, or the address of a package registry, means nothing to the next reader.
PRIVATE_TEXT = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w|pypi\.org|pythonhosted\.org")


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def all_modules() -> list[Path]:
    return [path for package in MAY_IMPORT for path in modules_of(package)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_in(nodes: Iterator[ast.AST] | list[ast.AST], package: str) -> set[str]:
    """Return the absolute dotted names that these import statements name; relative ones are counted in ``package``."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(package if node.level else node.module or "")
    return names


def imports_anywhere(path: Path) -> set[str]:
    return imports_in(ast.walk(ast.parse(path.read_text())), path.relative_to(ROOT).parts[0])


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_when_imported(path: Path) -> set[str]:
    """Return what importing the module imports: everything outside of functions and ``if TYPE_CHECKING``."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not is_type_checking(node):
            waiting.extend(ast.iter_child_nodes(node))
    return imports_in(found, path.relative_to(ROOT).parts[0])


def first_names(dotted: set[str]) -> set[str]:
    return {name.split(".")[0] for name in dotted}


def core_modules() -> list[Path]:
    """The modules of the pure core that exist; a name may stand for a module or for a package."""
    return [path for path in modules_of("engine") if path.stem not in WITH_TORCH]


@pytest.mark.parametrize("path", all_modules(), ids=name_of)
def test_imports_go_one_way_from_plans_to_stages_to_models_to_engine(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = first_names(imports_anywhere(path)) & {*TOP_LEVEL_FOLDERS}
    assert ours <= MAY_IMPORT[package], f"{name_of(path)} imports {sorted(ours - MAY_IMPORT[package])}"


@pytest.mark.parametrize("path", modules_of("engine"), ids=name_of)
def test_the_engine_does_not_know_transformers(path: Path) -> None:
    assert "transformers" not in first_names(imports_anywhere(path))


@pytest.mark.parametrize("path", core_modules(), ids=name_of)
def test_the_pure_core_does_not_import_torch(path: Path) -> None:
    assert not first_names(imports_when_imported(path)) & {"torch", "transformers"}


def test_importing_the_pure_core_does_not_load_torch_through_another_module_either() -> None:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in core_modules()]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    program = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_tree_has_the_six_top_level_folders_and_no_other_package() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert set(TOP_LEVEL_FOLDERS) <= folders
    packages = {name for name in folders - NOT_OURS if any((ROOT / name).glob("*.py"))}
    assert packages <= set(TOP_LEVEL_FOLDERS)


@pytest.mark.parametrize("path", [path for path in all_modules() if path.name == "__init__.py"], ids=name_of)
def test_every_package_says_what_lives_there_and_what_it_may_import(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(r"\bimports?\b", docstring), f"{name_of(path)}: {docstring!r}"


@pytest.mark.parametrize("path", all_modules(), ids=name_of)
def test_every_module_opens_with_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_every_folder_with_modules_is_a_package_so_that_the_wheel_has_it() -> None:
    folders = {path.parent for path in all_modules()}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_every_import_is_ours_the_standard_library_or_declared_in_pyproject(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [line for name in extras if name != "dev" for line in extras[name]]
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in requirements}
    imported = set().union(*(first_names(imports_anywhere(path)) for path in modules_of(package)))
    foreign = imported - sys.stdlib_module_names - MAY_IMPORT.keys() - OPTIONAL_IMPORTS - {"google_crc32c"}
    distributions = packages_distributions()
    undeclared = {
        name
        for name in foreign
        if not {dist.lower().replace("_", "-") for dist in distributions.get(name, [name])} & declared
    }
    assert undeclared == set()


def text_files() -> Iterator[Path]:
    waiting = [ROOT]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.is_dir():
                if path.name == ".ci" or not (path.name.startswith(".") or path.name in NOT_OURS):
                    waiting.append(path)
            elif path.suffix in TEXT_SUFFIXES:
                yield path


def test_no_file_names_a_path_of_one_machine_or_the_address_of_a_registry() -> None:
    found = {name_of(path): match.group() for path in text_files() if (match := PRIVATE_TEXT.search(path.read_text()))}
    assert found == {}
