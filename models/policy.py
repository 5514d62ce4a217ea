"""Where a policy comes from, without its weights: configuration, tokenizer, sizes, fingerprint; and how it is loaded.

A policy is named by a Hugging Face checkpoint directory, a directory or JSON file with a configuration alone (random
weights, for tests and simulation), or a name on a hub. Planning reads the configuration only; `load` is called by the
stage that brings the weights to the device.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from engine.device_kind import DeviceKind
from engine.errors import UsageError
from models import skeleton
from models.attention import ATTENTION_NAME
from models.dense import DenseModel
from models.float64 import lifted_casts
from models.support import check_config, check_structure, check_walk

_log = logging.getLogger(__name__)

_WEIGHT_PATTERN = "*.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.ckpt", "*.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

_LONGEST_MESSAGE = 600
# Characters of another library's message that are passed on.

_ALIGNED_BYTES = 64
# Kernels round otherwise on matrices that do not begin where a vector does, so bits would depend on a header's length.

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 2**16
# Of each weight file, so many evenly spaced blocks go into the fingerprint, with its size: a step changes every
# tensor, so checkpoints differ in each of them, and hundreds of gigabytes are not read.


@dataclass(frozen=True, kw_only=True)
class PolicySource:
    """A policy that is not loaded. ``location`` is what from_pretrained takes; None means random weights.

    ``config`` is that of the text model, and with ``overrides_config`` another one than the checkpoint's;
    ``has_other_parts`` says whether the checkpoint has more (vision).
    """

    name: str
    config: PreTrainedConfig
    location: str | None
    has_other_parts: bool = False
    overrides_config: bool = False

    def with_yarn(self, factor: float) -> PolicySource:
        """Return the policy for contexts ``factor`` times as long as it was made for, by YaRN (arXiv 2309.00071).

        Its rotary frequencies are interpolated once, whatever the length of a sequence, and a new checkpoint says so.

        Raises:
            UsageError: a factor that is not above 1, or a policy whose rotary embedding is scaled already.
        """
        given: object = factor
        if not isinstance(given, int | float) or not 1 < factor < math.inf:
            raise UsageError(f"yarn_factor={factor!r} must be a number above 1")
        config = copy.deepcopy(self.config)
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if rope.get("rope_type", "default") != "default":
            raise UsageError(f"policy {self.name!r} has rope type {rope['rope_type']!r} already; leave yarn_factor out")
        native = int(config.max_position_embeddings)
        yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": native}
        config.rope_parameters, config.max_position_embeddings = {**rope, **yarn}, int(native * factor)
        return replace(self, config=config, overrides_config=True)

    def tokenizer(self) -> Any:
        """Return the policy's tokenizer, None if it has none. Raises UsageError for one that can't be read."""
        if self.location is None:
            return None
        folder = Path(self.location)
        if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.location)
        except (OSError, ValueError) as error:
            raise UsageError(f"the tokenizer of policy {self.name!r} can't be read: {_first_line(error)}") from error

    def default_dtype(self) -> torch.dtype:
        """Return the dtype that the checkpoint says it is in, float32 if it does not say."""
        dtype = getattr(self.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) else torch.float32

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes with the configuration and with the weights: files here, name and revision on a hub."""
        values = {key: value for key, value in self.config.to_dict().items() if key != "_name_or_path"}
        state = hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=16)
        if self.location is not None and not Path(self.location).is_dir():
            state.update(f"{self.location} {getattr(self.config, '_commit_hash', None)}".encode())
        for path in self._weight_files():
            size = path.stat().st_size
            state.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for number in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                    state.update(file.read(_SAMPLE_BYTES))
        return state.hexdigest()

    def _weight_files(self) -> list[Path]:
        if self.location is None or not Path(self.location).is_dir():
            return []
        return sorted(Path(self.location).glob(_WEIGHT_PATTERN))

    def stop_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Return the ids that end a response: those of generation settings, configuration and tokenizer together."""
        found: list[int] = []
        for source in (self._generation_settings(), self.config, tokenizer):
            ids = getattr(source, "eos_token_id", None)
            found += [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
        return tuple(sorted({int(token) for token in found}))

    def _generation_settings(self) -> Any:
        """Return the checkpoint's generation settings, None where it has none."""
        if self.location is None:
            return None
        try:
            return GenerationConfig.from_pretrained(self.location)
        except (OSError, ValueError):
            return None

    def sizes_only(self, dtype: torch.dtype, kind: DeviceKind | None = None) -> DenseModel:
        """Return the model on torch's meta device: all sizes, no data, as it would run on a device of this ``kind``.

        Raises:
            UnsupportedModelError: the architecture is refused.
        """
        check_config(self.config, dtype)
        with torch.device("meta"), lifted_casts(dtype):
            hf = self._from_config(dtype)
            check_structure(hf)
            return DenseModel(hf, kind)

    def skeleton(self, dtype: torch.dtype) -> DenseModel:
        """Return the model without weights, once its architecture was checked on a layer of each kind.

        Raises:
            UnsupportedModelError: the adapter does not evaluate this architecture exactly, or not in parts.
        """
        self.small().load(dtype, seed=0)
        check_config(self.config, dtype)
        with ThreadPoolExecutor(1) as elsewhere:  # whoever counts tensors here must not count those without data
            return elsewhere.submit(self._skeleton, dtype).result()

    def _skeleton(self, dtype: torch.dtype) -> DenseModel:
        with lifted_casts(dtype):
            with torch.device("meta"):
                hf = self._from_config(dtype)
            check_structure(hf)
            skeleton.strip(hf)
        return DenseModel(hf)

    def small(self) -> PolicySource:
        """Return a random policy of the same architecture with a layer of each kind."""
        return PolicySource(name=self.name, config=skeleton.small_config(self.config), location=None)

    def why_not_in_parts(self, parameters: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return why the policy's parameters, given by name and shape, can't be loaded one by one; None if they can."""
        if self.location is None:
            return None
        if not Path(self.location).is_dir():
            return "it is on a hub, and not in a directory here"
        return skeleton.why_not_in_parts(self._weight_files(), parameters)

    def load_part(self, model: DenseModel, targets: Mapping[str, torch.Tensor], *, seed: int) -> None:
        """Load some parameters of a skeleton to ``targets``, which are attached to it, or draw them from ``seed``."""
        if self.location is None:
            with lifted_casts(model.dtype):
                skeleton.draw(model.hf, targets, seed)
        else:
            skeleton.read(self._weight_files(), targets)

    def load(self, dtype: torch.dtype, *, seed: int) -> DenseModel:
        """Load the weights (or draw them from ``seed``) and check the block walk against the model's own forward.

        Raises:
            UsageError: the checkpoint can't be read.
            UnsupportedModelError: the adapter does not evaluate this architecture exactly.
        """
        model = DenseModel(self.load_hf(dtype, seed=seed))
        check_walk(model)
        return model

    def load_hf(self, dtype: torch.dtype, *, seed: int) -> PreTrainedModel:
        """Load Hugging Face's own model, in evaluation mode. Raises as `load` does."""
        check_config(self.config, dtype)
        with lifted_casts(dtype):
            hf: Any = self._drawn(dtype, seed) if self.location is None else self._from_checkpoint(dtype)
        check_structure(hf)
        tied = hf.lm_head.weight is hf.model.embed_tokens.weight
        if tied != bool(hf.config.tie_word_embeddings):
            raise UsageError(
                f"policy {self.name!r}: its weights contradict tie_word_embeddings={not tied} of its "
                "configuration; correct config.json"
            )
        return cast(PreTrainedModel, hf.eval())

    def _drawn(self, dtype: torch.dtype, seed: int) -> PreTrainedModel:
        with no_init_weights():
            hf = self._from_config(dtype)
        cast(Any, hf).tie_weights()
        skeleton.draw(hf, [name for name, _ in hf.named_parameters()], seed)
        return hf

    def _from_config(self, dtype: torch.dtype) -> PreTrainedModel:
        config = copy.deepcopy(self.config)  # transformers writes into the one it is given
        try:
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"policy {self.name!r}: transformers can't build a causal model of it: {error}") from error
        return cast(PreTrainedModel, hf)

    def _from_checkpoint(self, dtype: torch.dtype) -> PreTrainedModel:
        try:
            with quiet():
                hf, found = cast(Any, AutoModelForCausalLM).from_pretrained(
                    cast(str, self.location),
                    dtype=dtype,
                    **({"config": copy.deepcopy(self.config)} if self.overrides_config else {}),
                    attn_implementation=ATTENTION_NAME,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                    output_loading_info=True,
                )
        except Exception as error:  # transformers and safetensors have kinds of their own for damaged files
            raise UsageError(f"policy {self.name!r} can't be loaded: {_shortened(error)}") from error
        lacking = sorted(str(key) for key in [*found["missing_keys"], *found["mismatched_keys"]])
        if lacking:
            raise UsageError(
                f"policy {self.name!r} lacks {len(lacking)} tensors of its architecture, or has them in another shape: "
                f"{', '.join(lacking[:3])}; they would be random"
            )
        if unused := sorted(map(str, found["unexpected_keys"])):
            _log.warning(
                "policy %r holds %d tensors that its architecture does not use, such as %s; they will be left out",
                self.name, len(unused), unused[0],
            )  # fmt: skip
        _align(hf)
        return cast(PreTrainedModel, hf)


def _align(hf: PreTrainedModel) -> None:
    """Bring parameters that lie in a mapped file, wherever its header ends, to memory as torch allocates it."""
    for parameter in hf.parameters():
        if parameter.data_ptr() % _ALIGNED_BYTES:
            parameter.data = parameter.data.clone()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own progress bars off the terminal, where ours is."""
    before = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()


def find_policy(policy: str | Path | PreTrainedConfig) -> PolicySource:
    """Return the policy of that name: a checkpoint directory, a configuration, or a name on a hub.

    Raises:
        UsageError: there is no such directory or name, or its configuration can't be read.
    """
    if isinstance(policy, PreTrainedConfig):
        return PolicySource(name=str(policy.model_type), config=_text_of(policy), location=None)
    path = Path(policy).expanduser()
    if path.suffix == ".json":
        return PolicySource(name=str(policy), config=_text_of(_read_config_file(path)), location=None)
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UsageError(
            f"policy {str(policy)!r} is a PEFT adapter, which is not trained here; merge it into its base model "
            "(merge_and_unload, save_pretrained) and give that directory"
        )
    if path.exists() and not (path / "config.json").is_file():
        raise UsageError(f"policy {str(policy)!r}: {path} has no config.json; give a Hugging Face checkpoint directory")
    try:
        config = AutoConfig.from_pretrained(str(path) if path.exists() else str(policy))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"policy {str(policy)!r} is neither a checkpoint directory here nor a name that a hub knows: "
            f"{_first_line(error)}"
        ) from error
    text, others = _text_of(config), _text_of(config) is not config
    if not path.is_dir():
        return PolicySource(name=str(policy), config=text, location=str(policy), has_other_parts=others)
    has_weights = any(path.glob(_WEIGHT_PATTERN))
    unread = [file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern)]
    if unread and not has_weights:
        raise UsageError(
            f"policy {str(policy)!r} has its weights in {unread[0]}, and only safetensors are read; "
            "load it with transformers and save it again (save_pretrained)"
        )
    location = str(path) if has_weights else None
    return PolicySource(name=str(policy), config=text, location=location, has_other_parts=others)


def _text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a multimodal model's text model; another one as it is."""
    text = getattr(config, "text_config", None)
    if not isinstance(text, PreTrainedConfig):
        return config
    if getattr(text, "dtype", None) is None:
        text.dtype = getattr(config, "dtype", None)
    return text


def _read_config_file(path: Path) -> PreTrainedConfig:
    try:
        data = json.loads(path.read_text())
        return AutoConfig.for_model(**data)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"policy {str(path)!r} is not a model configuration: {_first_line(error)}") from error


def _shortened(error: Exception) -> str:
    """Return an error's text on one line, without the frames of tables."""
    return " ".join(str(error).split())[:_LONGEST_MESSAGE]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
