"""The wheel holds all that runs: it works from any folder, also from one with packages named like ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("engine", "stages", "models", "plans"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(build, check=True, capture_output=True, cwd=folder)
    (wheel,) = folder.glob("longstraw-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run_engine(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m engine`` from ``cwd`` with the wheel first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "engine", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_brings_the_four_packages_the_licence_and_the_type_markers(installed: Path) -> None:
    found = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert {"engine/py.typed", "stages/py.typed", "models/py.typed", "plans/quickstart.py"} <= found
    assert any(name.endswith("licenses/LICENSE") for name in found)
    assert not any(name.startswith("tests/") for name in found)


def test_a_plan_runs_from_a_folder_that_has_a_models_and_a_stages_folder_of_its_own(
    installed: Path, tmp_path: Path
) -> None:
    for name in ("models", "stages", "plans"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package was imported')\n")
    result = run_engine(installed, tmp_path, "execute", "tiny_dense", "--run", "out", "--set", "prompt_tokens=40")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "results" / "checkpoint" / "model.safetensors").is_file()
