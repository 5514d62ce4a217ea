"""The alternatives that the engine is measured against do the same work: their gradients are the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.float64 import lifted_casts
from stages import LossConfig
from tests.benchmarks.peers import Dense, Form, Packed, Peer
from tests.helpers import make_group, random_group, save_policy, tiny_config
from tests.parity.dense_oracle import gradient

ADVANTAGES = [1.0, -0.5, 0.25]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"), tiny_config("llama"))


def given(response_tokens: list[int]) -> Any:
    drawn = random_group(0, 20, response_tokens)
    responses = [list(response.token_ids) for response in drawn.responses]
    return make_group({"prompt": list(drawn.prompt_ids), "responses": responses, "advantages": ADVANTAGES})


def peer_gradient(policy: Path, kind: Any, **options: Any) -> dict[str, torch.Tensor]:
    with lifted_casts(torch.float64):
        hf = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="sdpa").eval()
        for parameter in hf.parameters():
            parameter.grad = torch.zeros_like(parameter)
        peer: Peer = kind(hf=hf, advantages=ADVANTAGES, head_rows=4, **options)
        peer.step()
    return {name: parameter.grad for name, parameter in hf.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "options", "response_tokens"),
    [
        (Dense, {}, [3, 7, 1]),
        (Packed, {"form": "split"}, [3, 7, 1]),
        (Packed, {"form": "mask"}, [3, 7, 1]),
        (Packed, {"form": "grouped"}, [5, 5, 5]),
    ],
)
def test_a_peers_gradient_is_that_of_dense_autograd(
    policy: Path, kind: Any, options: dict[str, Form], response_tokens: list[int]
) -> None:
    group = given(response_tokens)
    _, expected = gradient(policy, [group], LossConfig(), 1.0)
    found = peer_gradient(policy, kind, group=group, **options)
    for name, reference in expected.items():
        assert (found[name] - reference).abs().max() <= 1e-10 * reference.abs().max(), name


def test_grouped_attention_refuses_responses_of_unequal_length(policy: Path) -> None:
    with pytest.raises(ValueError, match="must be equal for form='grouped'"):
        peer_gradient(policy, Packed, group=given([3, 7, 1]), form="grouped")
