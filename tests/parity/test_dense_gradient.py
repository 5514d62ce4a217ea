"""The engine's gradient equals that of one dense autograd graph: float64, 1e-10 of every parameter's largest entry.

Invariant 1. The oracle (`tests.parity.dense_oracle`) shares nothing with the engine but Hugging Face's modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.budget import Budget, Tier
from engine.plan import Plan
from engine.schedule import device_floor, staging_need
from models.policy import find_policy
from stages import Group, GrpoSettings, GrpoSpace, LossConfig
from stages.audit import max_rel_err
from tests.helpers import FAMILIES, Gradients, budget, make_group, random_ids, run_plan, save_policy, tiny_config
from tests.parity import dense_oracle

TOLERANCE = 1e-10

PolicyOf = Callable[..., Path]


@pytest.fixture(scope="module", name="policy_of")
def policies(tmp_path_factory: pytest.TempPathFactory) -> PolicyOf:
    """Random checkpoints by family, tied or not, and number of layers."""

    @cache
    def policy_of(family: str, tied: bool, layers: int) -> Path:
        config = tiny_config(family, tie_word_embeddings=tied, num_hidden_layers=layers)
        return save_policy(tmp_path_factory.mktemp("policy") / "checkpoint", config, seed=layers)

    return policy_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: shapes, loss, choices. Contents come from ``seed``. Lengths and masks are per group and response."""

    prompts: Sequence[int] = (20,)
    responses: Sequence[Sequence[int]] = ((7, 4),)
    masks: str = "full"  # holes: random zeros; last: the last response of the first group is fully masked
    loss: LossConfig = field(default_factory=LossConfig)
    old: str = "absent"  # given; some: for every other response
    advantages: str = "response"  # reward, token
    temperature: float = 1.0
    chunk_tokens: int = 6
    branches_at_once: int = 2
    head_rows: int = 5
    stored_inputs: int = 2
    page_tokens: int = 8
    within: str = "unlimited"  # host, disk: exactly the smallest device bytes; half
    layers: int = 2
    tied: bool = False
    attention: str = "eager"
    seed: int = 0


def record(case: Case, group: int, numbers: random.Random) -> dict[str, Any]:
    """Return the record of a group, without log-probs."""
    responses = [random_ids(numbers, count) for count in case.responses[group]]
    masks = [[1] * len(ids) for ids in responses]
    if case.masks == "holes":
        masks = [[int(numbers.random() < 0.6) for _ in ids] for ids in responses]
    if group == 0:
        if case.masks == "last" and len(responses) > 1:
            masks[-1] = [0] * len(responses[-1])
        first = next(index for index, ids in enumerate(responses) if ids)
        masks[first][0] = 1  # something to train on
    made = {"prompt": random_ids(numbers, case.prompts[group]), "responses": responses, "response_masks": masks}
    if case.advantages == "reward":
        return {**made, "rewards": [numbers.uniform(-1, 1) for _ in responses]}
    if case.advantages == "token":
        return {**made, "advantages": [[numbers.uniform(-2, 2) for _ in ids] for ids in responses]}
    return {**made, "advantages": [numbers.uniform(-2, 2) for _ in responses]}


def make_groups(case: Case, policy: Path) -> list[Group]:
    """Return the groups of a case; given log-probs are the policy's own with noise, so that ratios clip."""
    numbers = random.Random(case.seed)
    hf = dense_oracle.load(policy, "sdpa")
    groups = []
    for index in range(len(case.prompts)):
        plain = record(case, index, numbers)
        group = make_group(plain)
        with torch.no_grad():
            scores = [dense_oracle.score(hf, group, r, case.temperature).logprobs.tolist() for r in group.responses]

        def noisy(size: float, scores: list[list[float]] = scores) -> list[list[float]]:
            return [[min(0.0, value + numbers.gauss(0, size)) for value in row] for row in scores]

        if case.old != "absent":
            old = noisy(0.3)
            plain["old_logprobs"] = [row if case.old == "given" or n % 2 else None for n, row in enumerate(old)]
        if case.loss.kl is not None:
            plain["ref_logprobs"] = noisy(0.6)
        groups.append(make_group(plain))
    return groups


def space_of(case: Case, policy: Path, groups: Sequence[Group], gradient: Any = "exact") -> GrpoSpace:
    chosen = {
        "chunk_tokens": case.chunk_tokens,
        "branches_at_once": case.branches_at_once,
        "head_rows": case.head_rows,
        "stored_inputs": case.stored_inputs,
    }
    step = GrpoSettings(
        gradient=gradient,
        loss=case.loss,
        dtype=torch.float64,
        temperature=case.temperature,
        page_tokens=case.page_tokens,
        fixed=chosen,
        update_weights=False,
    )
    return GrpoSpace(name="parity", policy=find_policy(policy), steps=(tuple(groups),), settings=step)


def budget_of(plan: Plan, within: str) -> Budget:
    """Return the budget of that name for a plan; ``disk`` leaves the host room for what can live on no disk."""
    floor, _ = device_floor(plan)
    if within == "unlimited":
        return budget()
    if within == "half":
        return budget(device=floor + sum(v.nbytes for v in plan.values.values() if not v.pinned) // 2)
    if within == "host":
        return budget(device=floor)
    vectors = sum(v.nbytes for v in plan.values.values() if Tier.HOST in v.tiers and Tier.DISK not in v.tiers)
    return budget(device=floor, host=staging_need(plan) + vectors)


def check(case: Case, policy: Path, run: Path, gradient: Any = "exact") -> dict[str, int]:
    """Hold the engine's gradient and loss against the oracle's; return the bytes that were moved between tiers."""
    groups = make_groups(case, policy)
    space = space_of(case, policy, groups, gradient)
    plan = space.lower(space.first())
    done = run_plan(plan, run, budget_of(plan, case.within))
    loss, reference = dense_oracle.gradient(
        policy, groups, case.loss, case.temperature, attention=case.attention, stop_prompt=gradient == "stop-prompt"
    )
    assert done.gradients.keys() == reference.keys()
    drop_what_is_zero_in_theory(done.gradients, reference)
    assert max_rel_err(done.gradients, reference) <= TOLERANCE
    assert done.outcome.results["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert done.outcome.measured_peak_bytes["device"] <= done.planned.budget.device_bytes
    return done.outcome.measured_peak_bytes


def drop_what_is_zero_in_theory(found: Gradients, reference: Gradients) -> None:
    """Remove gradients of queries and keys where every token with a derivative sees itself only: rounding, no scale.

    The oracle decides; what is removed has to be rounding on both sides. (Its floor makes `max_rel_err` ask for 1e-16
    of the largest entry there, less than float64 can tell.)
    """
    rounding = 1e-14 * max(tensor.abs().max().item() for tensor in reference.values())
    names = [name for name in reference if ".q_" in name or ".k_" in name]
    if all(reference[name].abs().max().item() <= rounding for name in names):
        for name in names:
            assert found.pop(name).abs().max().item() <= rounding
            del reference[name]


LENGTHS = st.one_of(st.just(0), st.just(1), st.integers(2, 9), st.integers(10, 22))


@st.composite
def losses(draw: st.DrawFn) -> LossConfig:
    name = draw(st.sampled_from(["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo"]))
    kl = draw(st.sampled_from([None, "k1", "k2", "k3"]))
    return LossConfig(
        loss=name,
        epsilon_high=draw(st.sampled_from([None, 0.28])),
        delta=draw(st.sampled_from([None, 1.4])) if name != "cispo" else None,
        aggregation=draw(st.sampled_from([None, None, "token-sum", "seq-mean-token-sum", "token-mean"])),
        kl=kl,
        beta=0.0 if kl is None else draw(st.sampled_from([0.0, 0.1])),
        entropy_bonus=draw(st.sampled_from([0.0, 0.01, -0.02])),
        max_response_tokens=draw(st.sampled_from([None, 40])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_groups = draw(st.integers(1, 3))
    prompts = [draw(st.one_of(st.just(1), st.just(2), st.integers(3, 22))) for _ in range(num_groups)]
    responses = [draw(st.lists(LENGTHS, min_size=1, max_size=4)) for _ in range(num_groups)]
    if not any(responses[0]):
        responses[0][0] = draw(st.integers(1, 20))
    # One token, any, a last prompt chunk of one token, and longer than everything.
    chunk = st.one_of(st.just(1), st.integers(2, 9), st.just(max(1, prompts[0] - 2)), st.just(64))
    return Case(
        prompts=prompts,
        responses=responses,
        masks=draw(st.sampled_from(["full", "holes", "last"])),
        loss=draw(losses()),
        old=draw(st.sampled_from(["absent", "given", "some"])),
        advantages=draw(st.sampled_from(["response", "reward", "token"])),
        temperature=draw(st.sampled_from([1.0, 0.7, 1.3])),
        chunk_tokens=draw(chunk),
        branches_at_once=draw(st.integers(1, 4)),
        head_rows=draw(st.sampled_from([1, 3, 16])),
        stored_inputs=draw(st.sampled_from([0, 1, 2])),
        page_tokens=draw(st.sampled_from([1, 4, 7, 16])),
        within=draw(st.sampled_from(["unlimited", "half", "host", "disk"])),
        layers=draw(st.sampled_from([1, 2, 2, 3])),
        tied=draw(st.booleans()),
        attention=draw(st.sampled_from(["eager", "sdpa"])),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_equals_dense_autograd(
    family: str, policy_of: PolicyOf, tmp_path_factory: pytest.TempPathFactory
) -> None:
    @settings(max_examples=7, phases=[Phase.generate])  # shrinking would run hundreds of steps
    @given(cases())
    def holds(case: Case) -> None:
        check(case, policy_of(family, case.tied, case.layers), tmp_path_factory.mktemp("run") / "run")

    holds()


EDGES = {
    "a prompt of one token": Case(prompts=(1,), responses=((7, 4),)),
    "a prompt of two tokens": Case(prompts=(2,), responses=((7, 4),)),
    "chunks of one token": Case(prompts=(9,), responses=((5, 3),), chunk_tokens=1),
    "a last chunk of one token": Case(prompts=(14,), responses=((7, 4),), chunk_tokens=6),
    "a response of one token beside longer ones": Case(responses=((1, 8, 1),), branches_at_once=3, chunk_tokens=16),
    "a response longer than a chunk and longer than the prompt": Case(prompts=(5,), responses=((31, 3),)),
    "an empty response": Case(responses=((7, 0, 4),), advantages="reward"),
    "a fully masked response": Case(responses=((7, 4, 5),), masks="last", advantages="reward"),
    "tool output inside responses": Case(responses=((25, 12),), masks="holes", old="given"),
    "one branch at a time": Case(responses=((5, 6, 4, 3),), branches_at_once=1),
    "all branches in one wave": Case(responses=((5, 6, 4, 3),), branches_at_once=4, chunk_tokens=64),
    "several groups": Case(prompts=(12, 1, 19), responses=((4, 9), (3,), (2, 13)), loss=LossConfig(loss="dapo")),
    "pages on disk": Case(prompts=(30,), responses=((20, 7),), within="disk"),
    "pages on the host": Case(prompts=(30,), responses=((20, 7),), within="host"),
    "an entropy bonus and a KL term at a temperature": Case(
        loss=LossConfig(entropy_bonus=0.05, kl="k3", beta=0.2), old="some", temperature=0.8
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_the_gradient_equals_dense_autograd_with(name: str, policy_of: PolicyOf, tmp_path: Path) -> None:
    number = list(EDGES).index(name)
    check(EDGES[name], policy_of(FAMILIES[number % len(FAMILIES)], number % 2 == 1, 2), tmp_path / "run")


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo", "dr_grpo", "gspo", "cispo"])
def test_the_gradient_of_every_loss_equals_dense_autograd_off_policy(
    loss: str, policy_of: PolicyOf, tmp_path: Path
) -> None:
    case = Case(
        prompts=(11, 4),
        responses=((9, 5, 8), (6, 3)),
        loss=LossConfig(loss=loss, kl="k2", beta=0.1, entropy_bonus=0.01),
        old="given",
        advantages="reward",
    )
    check(case, policy_of("llama", True, 2), tmp_path / "run")


@pytest.mark.parametrize("within", ["unlimited", "half", "host", "disk"])
def test_a_budget_does_not_change_the_gradient_and_decides_the_tiers(
    within: str, policy_of: PolicyOf, tmp_path: Path
) -> None:
    case = Case(prompts=(40,), responses=((20, 8),), within=within, chunk_tokens=8)
    peak = check(case, policy_of("mistral", False, 2), tmp_path / "run")
    assert (peak["host"] > 0) == (within != "unlimited")
    assert (peak["disk"] > 0) == (within == "disk")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_end_of_sequence_token_equal_to_padding_gets_the_gradient_that_dense_autograd_gives_it(
    tied: bool, tmp_path: Path
) -> None:
    """Hugging Face's embedding has a ``padding_idx``, whose look-up gradient its own autograd leaves out."""
    config = tiny_config("llama", tie_word_embeddings=tied, pad_token_id=3, eos_token_id=3)
    policy = save_policy(tmp_path / "policy", config)
    group = make_group({"prompt": [1, 3, 5, 3, 7], "responses": [[3, 4, 3, 6], [9, 3]], "advantages": [1.0, -0.5]})
    case = Case()
    space = space_of(case, policy, [group])
    done = run_plan(space.lower(space.first()), tmp_path / "run")
    _, reference = dense_oracle.gradient(policy, [group], case.loss, 1.0)
    assert max_rel_err(done.gradients, reference) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_stop_prompt_equals_dense_autograd_with_the_keys_and_values_of_the_prompt_detached(
    family: str, policy_of: PolicyOf, tmp_path: Path
) -> None:
    case = Case(prompts=(17, 1), responses=((9, 14), (5,)), old="given", masks="holes")
    check(case, policy_of(family, family == "qwen3", 2), tmp_path / "run", gradient="stop-prompt")


def test_stop_prompt_is_not_the_exact_gradient(policy_of: PolicyOf, tmp_path: Path) -> None:
    policy = policy_of("llama", False, 2)
    case = Case(prompts=(17,), responses=((9, 14),))
    groups = make_groups(case, policy)
    _, exact = dense_oracle.gradient(policy, groups, case.loss, 1.0)
    _, stopped = dense_oracle.gradient(policy, groups, case.loss, 1.0, stop_prompt=True)
    assert max_rel_err(stopped, exact) > 1e-2
    check(replace(case, within="disk"), policy, tmp_path / "run", gradient="stop-prompt")
