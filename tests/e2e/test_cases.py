"""Inputs that broke somebody, end to end: each goes to the command line as a rollouts file and has its right result.

Every test names the kind of input it stands for. Kinds that are about shapes alone (prompts of one token, chunk edges,
responses longer than a chunk, orders of branches, a vocabulary of 250,000) are held against dense autograd in
``tests/parity``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.__main__ import main
from models.float64 import lifted_casts
from tests.helpers import Gradients, checkpoint_tensors, same_bits, save_policy, tiny_config
from tests.parity import dense_oracle

WORDS = ["<s>", "</s>", "<pad>", *"abcdefghijklmnop"]
EOS, PAD = 1, 2


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command came back with. ``report`` is its JSON, empty where there is none."""

    code: int
    report: dict[str, Any]
    stderr: str
    gradients: Gradients

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.report["metrics"])


Execute = Callable[..., Ran]


def tokenizer_of(pad: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token=pad)


@pytest.fixture(scope="module", name="policy")
def _policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = save_policy(tmp_path_factory.mktemp("policy") / "checkpoint", tiny_config("llama"))
    tokenizer_of("<pad>").save_pretrained(policy)
    return policy


@pytest.fixture(name="execute")
def _execute(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Execute:
    """Return a function that writes records to a rollouts file and executes one step over them."""
    runs: list[int] = []

    def execute(*records: dict[str, Any], use: Path = policy, **settings: Any) -> Ran:
        runs.append(len(runs))
        rollouts = tmp_path / f"rollouts{len(runs)}.jsonl"
        rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
        run, file = tmp_path / f"run{len(runs)}", tmp_path / f"gradients{len(runs)}.safetensors"
        chosen = {"policy": use, "rollouts": rollouts, "dtype": "float64", **settings}
        pairs = [item for name, value in chosen.items() for item in ("--set", f"{name}={value}")]
        capsys.readouterr()
        code = main(["execute", "from_rollouts", "--json", "--run", str(run), "--save-gradients", str(file), *pairs])
        out = capsys.readouterr()
        assert run.exists() == (code == 0), out.err  # what is refused is refused before any work
        return Ran(
            code=code,
            report=json.loads(out.out) if code == 0 else {},
            stderr=out.err,
            gradients=load_file(file) if code == 0 else {},
        )

    return execute


def record(**changes: Any) -> dict[str, Any]:
    """Return a good record; a value of None leaves a key out."""
    good = {
        "prompt": [3, 9, 4, 12],
        "responses": [[5, 6, 7], [8, 10], [11, 4, 9, 6]],
        "rewards": [1.0, 0.0, 0.4],
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


def logprobs_of(policy: Path, given: dict[str, Any], temperature: float = 1.0) -> list[list[float]]:
    """Return the log-probs of every response by Hugging Face's own forward."""
    hf, found = dense_oracle.load(policy, "sdpa"), []
    for response in given["responses"]:
        with torch.no_grad(), lifted_casts(torch.float64):
            logits = hf(torch.tensor([given["prompt"] + response])).logits[0, len(given["prompt"]) - 1 : -1]
        table = torch.log_softmax(logits / temperature, -1)
        found.append(table.gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
    return found


def close(left: Gradients, right: Gradients, factor: float = 1.0) -> bool:
    """Return whether two gradients agree to rounding, the right one times ``factor``."""
    scale = max(tensor.abs().max().item() for tensor in right.values())
    return all((left[name] - factor * right[name]).abs().max().item() <= 1e-12 * scale for name in right)


# All rewards of a group equal


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo"])
def test_equal_rewards_give_a_gradient_of_exactly_zero_and_the_run_says_so(
    loss: str, reward: float, execute: Execute, policy: Path
) -> None:
    ran = execute(record(rewards=[reward] * 3), loss=loss, learning_rate=0.1)
    assert (ran.code, ran.report["loss"], ran.report["grad_norm"], ran.metrics["advantage_mean"]) == (0, 0.0, 0.0, 0.0)
    assert all(not tensor.any() for tensor in ran.gradients.values())
    assert same_bits(checkpoint_tensors(Path(ran.report["checkpoint"])), checkpoint_tensors(policy))
    assert "rollouts1.jsonl line 1: all 3 rewards are equal: this group carries no signal" in ran.stderr


def test_a_group_without_signal_leaves_the_gradient_of_the_others_unchanged_but_counts_in_the_step(
    execute: Execute,
) -> None:
    alone = execute(record())
    both = execute(record(), record(prompt=[5, 5], rewards=[2, 2, 2]))
    assert close(both.gradients, alone.gradients, factor=0.5)
    assert "line 2: all 3 rewards are equal" in both.stderr


# A group of one response


def test_a_group_of_one_response_has_advantage_zero_and_the_run_says_so(execute: Execute) -> None:
    ran = execute(record(responses=[[5, 6]], rewards=[7.0]))
    assert (ran.code, ran.report["grad_norm"], ran.metrics["advantage_mean"]) == (0, 0.0, 0.0)
    assert "one response, whose baseline is its own reward" in ran.stderr


def test_a_group_of_one_response_can_be_trained_on_with_an_advantage_of_its_own(execute: Execute) -> None:
    ran = execute(record(responses=[[5, 6]], rewards=None, advantages=[0.7]))
    assert ran.metrics["advantage_mean"] == pytest.approx(0.7, rel=1e-12)
    assert ran.report["grad_norm"] > 0


# An empty response; a response whose every token is masked; a whole batch like that

NOTHING = {
    "an empty response": {"responses": [[5, 6, 7], [], [8, 10]]},
    "a fully masked response": {
        "responses": [[5, 6, 7], [9, 9], [8, 10]],
        "response_masks": [[1, 1, 1], [0, 0], [1, 1]],
    },
}


@pytest.mark.parametrize("changes", NOTHING.values(), ids=NOTHING)
def test_a_response_without_trainable_tokens_adds_nothing_and_counts(changes: dict[str, Any], execute: Execute) -> None:
    given = execute(record(rewards=None, advantages=[0.7, 3.0, -0.4], **changes))
    without = execute(record(responses=[[5, 6, 7], [8, 10]], rewards=None, advantages=[0.7, -0.4]))
    assert given.metrics["responses"] == 3
    assert given.metrics["tokens"] == without.metrics["tokens"] == 5
    assert close(given.gradients, without.gradients, factor=2 / 3)
    both, alone = (
        execute(record(rewards=None, advantages=advantages, **given_changes), loss="dapo").gradients
        for advantages, given_changes in (
            ([0.7, 3.0, -0.4], changes),
            ([0.7, -0.4], {"responses": [[5, 6, 7], [8, 10]]}),
        )
    )
    assert close(both, alone)


@pytest.mark.parametrize("changes", NOTHING.values(), ids=NOTHING)
def test_a_response_without_trainable_tokens_counts_in_the_baseline(changes: dict[str, Any], execute: Execute) -> None:
    ran = execute(record(rewards=[1.0, 1.0, 4.0], **changes), loss="dr_grpo")
    assert ran.metrics["advantage_mean"] == pytest.approx((3 * -1.0 + 2 * 2.0) / 5, rel=1e-12)
    assert math.isfinite(ran.report["loss"])


@pytest.mark.parametrize(
    "changes",
    [
        {"responses": [[], [], []]},
        {"response_masks": [[0, 0, 0], [0, 0], [0, 0, 0, 0]]},
        {"responses": [[], [5], []], "response_masks": [[], [0], []]},
    ],
    ids=["empty", "masked", "both"],
)
def test_a_batch_without_a_trainable_token_is_refused_before_any_work(
    changes: dict[str, Any], execute: Execute
) -> None:
    ran = execute(record(**changes), record(prompt=[4], **changes))
    assert ran.code == 2
    assert "nothing to train on: 2 groups with 6 responses" in ran.stderr


# End-of-sequence id equal to the padding id


def test_masks_come_from_lengths_where_end_of_sequence_and_padding_are_one_id(execute: Execute, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("llama"))
    tokenizer_of("</s>").save_pretrained(policy)
    given = record(prompt=[EOS, EOS, 4], responses=[[5, EOS], [EOS, EOS, 6], [7]])
    ran = execute(given, use=policy)
    assert ran.metrics["tokens"] == 6
    ids = {EOS: 9, 9: EOS}  # the same rollouts with the two ids' weights exchanged
    hf = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for weight in (hf.lm_head.weight, hf.model.embed_tokens.weight):
            weight[[EOS, 9]] = weight[[9, EOS]].clone()
    hf.save_pretrained(tmp_path / "exchanged")
    renamed = {key: [ids.get(i, i) for i in given[key]] for key in ("prompt",)}
    responses = [[ids.get(i, i) for i in response] for response in given["responses"]]
    other = execute({**given, **renamed, "responses": responses}, use=tmp_path / "exchanged")
    assert other.report["loss"] == pytest.approx(ran.report["loss"], abs=1e-12)
    for name, tensor in other.gradients.items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensor[[EOS, 9]] = tensor[[9, EOS]].clone()
    assert close(other.gradients, ran.gradients)


# Tool output inside a response


def test_tool_output_carries_no_loss_and_later_tokens_see_it(execute: Execute) -> None:
    def with_tool(output: list[int], tail: list[int]) -> Ran:
        masks = [[1, *[0] * len(output), *[1] * len(tail)], [1, 1], [1, 1, 1, 1]]
        return execute(record(responses=[[5, *output, *tail], [8, 10], [11, 4, 9, 6]], response_masks=masks))

    seen = [with_tool([6, 7], [9]), with_tool([6, 13], [9])]
    assert seen[0].metrics["tokens"] == 8
    assert not close(seen[0].gradients, seen[1].gradients)
    unseen = [with_tool([6, 7], []), with_tool([14, 3], [])]
    assert same_bits(unseen[0].gradients, unseen[1].gradients)


# Temperature other than 1


def test_log_probs_are_those_of_the_sampling_distribution_at_its_temperature(execute: Execute, policy: Path) -> None:
    given = record()
    old = logprobs_of(policy, given, temperature=0.6)
    same = execute({**given, "old_logprobs": old}, temperature=0.6)
    assert same.metrics["old_logprob_drift_max"] <= 1e-12
    assert execute({**given, "old_logprobs": old}).metrics["old_logprob_drift_max"] > 0.1
    greedy = execute(given, temperature=0.6)
    assert (greedy.metrics["ratio_min"], greedy.metrics["ratio_max"]) == (1.0, 1.0)


# Rollout log-probs absent, present, off by rounding


def test_without_log_probs_every_ratio_is_exactly_one_in_every_dtype(execute: Execute) -> None:
    for dtype in ("float64", "float32", "bfloat16"):
        metrics = execute(record(), dtype=dtype).metrics
        assert (metrics["ratio_min"], metrics["ratio_max"], metrics["kl_old"]) == (1.0, 1.0, 0.0)
        assert "old_logprob_drift_max" not in metrics


def test_given_log_probs_are_used_as_they_are(execute: Execute, policy: Path) -> None:
    given = record()
    shifted = [[value - 0.1 for value in row] for row in logprobs_of(policy, given)]
    metrics = execute({**given, "old_logprobs": shifted}).metrics
    assert metrics["ratio_min"] == pytest.approx(math.exp(0.1), abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.1), abs=1e-5)


def test_log_probs_off_by_rounding_are_used_as_given_and_the_drift_is_reported(execute: Execute, policy: Path) -> None:
    given = record()
    rounded = [[float(torch.tensor(v).bfloat16()) for v in row] for row in logprobs_of(policy, given)]
    ran = execute({**given, "old_logprobs": rounded}, dtype="float32")
    assert 0 < ran.metrics["old_logprob_drift_mean"] <= ran.metrics["old_logprob_drift_max"] < 0.05
    assert ran.metrics["ratio_max"] != 1.0


# Ids given with a text that they do not decode to


def test_ids_that_do_not_decode_to_their_text_are_refused(execute: Execute) -> None:
    ran = execute(record(responses=["abc", "de", "fg"], response_ids=[[3, 4, 5], [6, 7], [8, 10]]))
    assert ran.code == 2
    assert "group 0, response 2: the token ids decode to" in ran.stderr


def test_text_and_ids_that_agree_train_as_the_ids_alone(execute: Execute) -> None:
    ids = [[3, 4, 5], [6, 7], [8, 9]]
    both = execute(record(responses=["abc", "de", "fg"], response_ids=ids))
    assert same_bits(both.gradients, execute(record(responses=ids)).gradients)


# Padding on the left


@pytest.mark.parametrize(
    "changes", [{"prompt": [PAD, PAD, 4, 5]}, {"attention_mask": [0, 1, 1, 1]}], ids=["ids", "attention mask"]
)
def test_padding_on_the_left_is_refused_with_that_reason(changes: dict[str, Any], execute: Execute) -> None:
    ran = execute(record(**changes))
    assert ran.code == 2
    assert "padding" in ran.stderr
    assert "rollouts1.jsonl line 1" in ran.stderr


# A token id outside the vocabulary, negative, not an integer


@pytest.mark.parametrize("token", [61, 10**12, -1, 4.5, "4", True, None])
def test_a_wrong_token_id_is_refused_with_group_response_and_position(token: Any, execute: Execute) -> None:
    ran = execute(record(), record(responses=[[5], [8, 10, token], [4]]))
    assert ran.code == 2
    assert "rollouts1.jsonl line 2, group 1, response 1, position 2: token id" in ran.stderr


# Advantages, rewards or log-probs that are not finite


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"rewards": [1.0, math.nan, 0.0]}, "response 1: reward is not finite: nan"),
        ({"rewards": [1.0, 0.0, math.inf]}, "response 2: reward is not finite: inf"),
        ({"rewards": None, "advantages": [1.0, -math.inf, 0.0]}, "response 1: advantage is not finite"),
        (
            {"old_logprobs": [[-1.0, -1.0, -1.0], [-1.0, math.nan], [-1.0] * 4]},
            "response 1, position 1: old_logprobs entry is not finite",
        ),
        (
            {"ref_logprobs": [[-math.inf, -1.0, -1.0], [-1.0] * 2, [-1.0] * 4]},
            "response 0, position 0: ref_logprobs entry is not finite",
        ),
    ],
)
def test_what_is_not_finite_is_refused_with_its_place_before_the_first_stage(
    changes: dict[str, Any], place: str, execute: Execute
) -> None:
    ran = execute(record(**changes))
    assert ran.code == 2
    assert f"rollouts1.jsonl line 1, group 0, {place}" in ran.stderr
