"""The everyday plan, through the command line: what it takes, what it refuses, and that refusals leave nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.__main__ import main
from tests.helpers import checkpoint_tensors, save_policy, tiny_config

GROUPS = [{"prompt": list(range(1, 9 + index)), "responses": [[3, 4], [5]], "rewards": [1, 0]} for index in range(3)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy and a rollouts file of three groups, and the current one."""
    save_policy(tmp_path / "policy", tiny_config(tie_word_embeddings=True))
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in GROUPS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, *settings: str) -> int:
    words = [word for setting in ("policy=policy", "rollouts=rollouts.jsonl", *settings) for word in ("--set", setting)]
    return main([command, "from_rollouts", *words, "--json", *(["--run", "run"] if command == "execute" else [])])


def test_a_step_over_all_groups_writes_a_checkpoint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("execute", "learning_rate=0.01") == 0
    report = json.loads(capfd.readouterr().out)
    assert report["metrics"]["responses"] == 6
    before, after = checkpoint_tensors(folder / "policy"), checkpoint_tensors(Path(report["checkpoint"]))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["groups_per_step=0"], "groups_per_step=0 must be a whole number of at least 1"),
        (["groups_per_step=-1"], "groups_per_step=-1 must be a whole number of at least 1"),
        (["steps=0"], "steps=0 must be a whole number of at least 1"),
        (["groups_per_step=4"], "1 steps of 4 groups need 4 groups with responses, but there are 3"),
        (["steps=2", "groups_per_step=2"], "2 steps of 2 groups need 4 groups with responses, but there are 3"),
        (["steps=4"], "4 steps of 1 groups need 4 groups with responses, but there are 3"),
    ],
)
def test_more_groups_than_the_file_has_are_refused(
    settings: list[str], told: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("simulate", *settings) == 2
    assert told in capfd.readouterr().err


def test_several_steps_share_the_groups_of_the_file_out(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("execute", "steps=3", "checkpoint_every=2", "save_optimizer=true", "schedule=cosine") == 0
    report = json.loads(capfd.readouterr().out)
    results = Path(report["checkpoint"]).parent
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["responses"]) for line in lines] == [(0, 2), (1, 2), (2, 2)]
    assert lines[0]["learning_rate"] > lines[1]["learning_rate"] > lines[2]["learning_rate"] > 0
    assert {path.name for path in results.iterdir()} == {
        "checkpoint", "checkpoint-2", "metrics.jsonl", "optimizer.safetensors", "optimizer-2.safetensors",
    }  # fmt: skip


def test_the_groups_that_are_left_out_are_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "groups_per_step=2") == 0
    assert json.loads(capfd.readouterr().out)["notes"] == ["groups 2 to 2 of rollouts.jsonl are left out of this run"]


def test_a_policy_that_is_rounded_to_the_compute_dtype_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "dtype=bfloat16") == 0
    assert "its weights are rounded" in json.loads(capfd.readouterr().out)["notes"][0]


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = folder / "policy" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert run("execute") != 0
    assert "model.layers.1.self_attn.o_proj.weight" in capfd.readouterr().err


def test_a_model_that_is_refused_once_loaded_leaves_no_run_directory(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_policy(folder / "policy", tiny_config("granite", logits_scaling=8.0))
    assert run("execute") == 2
    assert "GraniteForCausalLM is refused" in capfd.readouterr().err
    assert not (folder / "run").exists()


def test_an_adapter_is_refused_with_advice(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    words = ["--set", "policy=adapter", "--set", "rollouts=rollouts.jsonl"]
    assert main(["simulate", "from_rollouts", *words]) == 2
    assert "merge it into its base model" in capfd.readouterr().err


def test_log_probs_far_below_zero_do_not_stop_a_plan_from_being_made(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = [[-120.0, -150.0], [-200.0]]
    groups = [{**group, "old_logprobs": old} for group in GROUPS]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(group) + "\n" for group in groups))
    assert run("simulate") == 0


def test_the_smallest_device_budget_is_that_of_the_leanest_choice_and_runs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    group = {"prompt": [1, 2, 3, 4, 5], "responses": [[6] * 66], "rewards": [1.0]}
    (folder / "rollouts.jsonl").write_text(json.dumps(group))
    assert run("simulate") == 0
    smallest = json.loads(capfd.readouterr().out)["smallest_device_bytes"]
    words = ["--set", "policy=policy", "--set", "rollouts=rollouts.jsonl", "--json", "--budget"]
    for tokens in (64, 128):
        fixed = ["--set", f"chunk_tokens={tokens}"]
        assert main(["simulate", "from_rollouts", *words, "device=1", *fixed]) == 3
        assert json.loads(capfd.readouterr().out)["smallest_device_bytes"] >= smallest
    assert main(["execute", "from_rollouts", *words, f"device={smallest}", "--run", "run"]) == 0
    assert json.loads(capfd.readouterr().out)["measured_peak_bytes"]["device"] <= smallest


def test_weights_in_another_format_than_safetensors_are_refused_and_not_replaced_by_random_ones(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "policy" / "model.safetensors").rename(folder / "policy" / "pytorch_model.bin")
    assert run("simulate") == 2
    assert "only safetensors are read" in capfd.readouterr().err


def test_random_weights_are_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "policy" / "model.safetensors").unlink()
    assert run("simulate") == 0
    assert "its weights are random, drawn from seed 0" in json.loads(capfd.readouterr().out)["notes"][0]


def test_gradients_are_not_written_over_what_is_no_regular_file(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(folder / "pipe")
    words = ["--set", "policy=policy", "--set", "rollouts=rollouts.jsonl", "--run", "run"]
    assert main(["execute", "from_rollouts", *words, "--save-gradients", "pipe"]) == 2
    assert "no regular file" in capfd.readouterr().err
    assert (folder / "pipe").is_fifo()
    assert not (folder / "run").exists()


def test_a_run_inside_another_run_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("execute") == 0
    words = ["--set", "policy=policy", "--set", "rollouts=rollouts.jsonl"]
    assert main(["execute", "from_rollouts", *words, "--run", "run/results/inner"]) == 2
    assert "lies inside another run" in capfd.readouterr().err


def test_new_weights_that_are_not_finite_stop_the_run_before_its_checkpoint(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("execute", "learning_rate=1e39") == 5
    assert "new weights are not finite" in capfd.readouterr().err
    assert not (folder / "run" / "results" / "checkpoint").exists()
