"""A tied embedding's look-up share as rows of the ids that occur: the bits of a whole matrix, in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.plan import Plan
from models.policy import find_policy
from stages import AdamWOptions, Group, GrpoSettings, GrpoSpace, RolloutSettings, lookup, names
from stages.groups import Prompt
from tests.helpers import (
    Done,
    checkpoint_tensors,
    one_thread,
    random_group,
    run_plan,
    same_bits,
    save_policy,
    tiny_config,
)

VOCABULARY = 400
CHOICES = {"chunk_tokens": 8, "branches_at_once": 2, "head_rows": 8}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3", vocab_size=VOCABULARY, tie_word_embeddings=True)
    return save_policy(tmp_path_factory.mktemp("policy") / "checkpoint", config)


def plan_of(policy: Path, groups: list[Group | Prompt], **changes: Any) -> Plan:
    options = AdamWOptions(learning_rate=1e-2)
    settings = GrpoSettings(page_tokens=8, fixed=CHOICES, optimizer=options, epochs_per_step=2, **changes)
    rollout = RolloutSettings(
        reward=lambda sample: float(len(sample.token_ids) % 3), group_size=3, max_response_tokens=7
    )
    space = GrpoSpace(
        name="test", policy=find_policy(policy), steps=(tuple(groups),), settings=settings, rollout=rollout
    )
    return space.lower(space.first())


def both(
    monkeypatch: pytest.MonkeyPatch, policy: Path, groups: list[Group | Prompt], tmp_path: Path, **changes: Any
) -> tuple[Done, Done]:
    """Run with rows of the ids that occur and with a whole matrix."""
    done = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(lookup, "LARGEST_SHARE", share)
        done.append(run_plan(plan_of(policy, groups, **changes), tmp_path / str(share)))
    rows, whole = done
    first = names.update_prefix(0, 0, 2)
    assert names.lookup(first) in rows.planned.plan.values
    assert names.head_gradients(first) in whole.planned.plan.values
    return rows, whole


@pytest.mark.parametrize("gradient", ["exact", "stop-prompt"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_ids_that_occur_have_the_bits_of_a_whole_matrix(
    dtype: torch.dtype, gradient: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Group | Prompt] = [random_group(seed, 21, [6, 11, 9], VOCABULARY) for seed in (1, 2)]
    rows, whole = both(monkeypatch, policy, groups, tmp_path, dtype=dtype, gradient=gradient)
    assert rows.gradients.keys() == whole.gradients.keys()
    assert same_bits(rows.gradients, whole.gradients)
    assert same_bits(checkpoint_tensors(rows.checkpoint), checkpoint_tensors(whole.checkpoint))


def test_rows_have_room_for_all_that_may_be_sampled_and_the_bits_of_a_whole_matrix(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_group(3, 12, [2], VOCABULARY).prompt_ids
    groups: list[Group | Prompt] = [Prompt(token_ids=prompt, source="test"), random_group(4, 9, [3, 2], VOCABULARY)]
    rows, whole = both(monkeypatch, policy, groups, tmp_path, first_step=5)
    assert same_bits(rows.gradients, whole.gradients)
    ids = rows.planned.plan.values[names.lookup_ids(names.update_prefix(0, 0, 2))].tensors["ids"]
    assert ids.num_elements <= len(set(prompt)) + 3 * 6 + 9 + 3


def test_rows_take_fewer_bytes_and_what_is_measured_is_what_was_planned(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, whole = both(monkeypatch, policy, [random_group(1, 21, [6, 11], VOCABULARY)], tmp_path)
    peaks = []
    for done in (rows, whole):
        stages = {
            n: p for n, p in done.outcome.stage_peak_bytes.items() if n.split()[0] in ("lookup", "replay", "sweep")
        }
        assert {name: pair for name, pair in stages.items() if pair[0] != pair[1]} == {}
        peaks.append(max(measured for name, (_, measured) in stages.items() if name.startswith("replay")))
    saved = VOCABULARY - rows.planned.plan.values[names.lookup(names.update_prefix(0, 0, 2))].tensors["rows"].shape[0]
    assert peaks[1] - peaks[0] == pytest.approx(saved * 32 * 4, abs=4096)
    assert saved > 0.9 * VOCABULARY


def test_rows_are_kept_where_no_more_than_a_quarter_of_the_vocabulary_can_occur(policy: Path) -> None:
    few, many = (plan_of(policy, [random_group(1, tokens, [5, 5], VOCABULARY)]) for tokens in (40, 400))
    first = names.update_prefix(0, 0, 2)
    assert names.head_gradients(first) not in few.values
    assert few.values[names.lookup(first)].nbytes < 0.25 * many.values[names.head_gradients(first)].nbytes
    assert names.lookup(first) not in many.values
