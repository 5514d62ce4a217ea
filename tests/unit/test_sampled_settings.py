"""What a plan says of sampled groups is checked when it says it: prompts, functions, counts, stop tokens, data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import PlanError, UsageError
from engine.plan import Plan, Stage, TensorSpec, Value
from stages import Group, GrpoSettings, Prompt, RolloutSettings, Sample, deal, find_policy, grpo_run
from stages.rewards import SampledGroup
from stages.step_record import SampledSizes, StepRecord
from tests.helpers import random_group, tiny_config


def zero(sample: Sample) -> float:
    return 0.0


@pytest.mark.parametrize("ids", [(1, 2.5, 9), "text", (None,), (True, 2), b"abc", {1: 2}])
def test_token_ids_that_are_no_whole_numbers_are_refused(ids: Any) -> None:
    with pytest.raises(UsageError, match=r"prompt 7: .*token id"):
        Prompt(token_ids=ids, source="prompt 7")


def test_token_ids_may_be_numpys_or_a_tensors() -> None:
    assert Prompt(token_ids=np.array([3, 4])).token_ids == (3, 4)  # type: ignore[arg-type]
    assert Prompt(token_ids=torch.tensor([3, 4])).token_ids == (3, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{1, 2}, object(), {"a": object()}, {1: "a", "b": 2}])
def test_data_that_is_not_plain_is_refused(data: object) -> None:
    with pytest.raises(UsageError, match=r"prompt: its data is not plain"):
        Prompt(token_ids=(1,), data=data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": 5}, r"reward=5 is no function"),
        ({"advantage": 5}, r"advantage=5 is no function"),
        ({"group_size": 0}, r"group_size=0 must be a whole number"),
        ({"group_size": 2.0}, r"group_size=2\.0 must be a whole number"),
        ({"group_size": True}, r"group_size=True must be a whole number"),
        ({"max_response_tokens": 1.5}, r"max_response_tokens=1\.5 must be a whole number"),
        ({"stop_token_ids": 5}, r"stop_token_ids=5 must be a tuple"),
        ({"stop_token_ids": (1, "a")}, r"stop_token_ids=\(1, 'a'\) must be a tuple"),
        ({"workspace_bytes": -1}, r"workspace_bytes=-1 must be a whole number"),
        ({"workspace_bytes": None}, r"workspace_bytes=None must be a whole number"),
        ({"greedy": "no"}, r"greedy='no' must be True or False"),
        ({"stop_token_ids": (True,)}, r"stop_token_ids=\(True,\) must be a tuple"),
    ],
)
def test_rollout_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RolloutSettings(**{"reward": zero, **settings})


def test_stop_tokens_may_be_a_list() -> None:
    assert RolloutSettings(reward=zero, stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [0, 2.0, True])
def test_epochs_are_a_whole_number(epochs: Any) -> None:
    with pytest.raises(UsageError, match=r"epochs_per_step=.* must be a whole number"):
        GrpoSettings(epochs_per_step=epochs)


@pytest.mark.parametrize(
    ("steps", "rollout", "message"),
    [
        ([], None, r"a run has at least one step"),
        ([[Prompt(token_ids=(1, 2))]], None, r"step 0: prompt has no responses; give rollout="),
        ([[Prompt(token_ids=(1, 99))]], RolloutSettings(reward=zero), r"token id 99, outside the vocabulary of 61"),
        ([[Prompt(token_ids=())]], RolloutSettings(reward=zero), r"step 0: prompt has no tokens"),
        ([[random_group(0, 5, [3])]], RolloutSettings(reward=zero), r"all groups have theirs; leave it out"),
        (
            [[Prompt(token_ids=(1, 2))]],
            RolloutSettings(reward=zero, stop_token_ids=(61,)),
            r"stop_token_ids=\(61,\) are not all in the vocabulary of 61",
        ),
    ],
)
def test_steps_that_can_not_be_run_are_refused(
    steps: list[list[Group | Prompt]], rollout: RolloutSettings | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        grpo_run(name="t", policy=find_policy(tiny_config()), steps=steps, settings=GrpoSettings(), rollout=rollout)


def test_groups_are_dealt_in_order_prompts_come_round_again_and_given_groups_do_not() -> None:
    prompts = [Prompt(token_ids=(n,)) for n in range(3)]
    dealt = deal(prompts, steps=4, groups_per_step=2)
    assert [[group.token_ids[0] for group in step if isinstance(group, Prompt)] for step in dealt] == [
        [0, 1], [2, 0], [1, 2], [0, 1],
    ]  # fmt: skip
    assert deal(prompts * 2, steps=2, first_step=1) == deal(prompts * 2, steps=3)[1:]
    groups = [random_group(n, 4, [2]) for n in range(5)]
    assert deal(groups, steps=2) == [groups[:2], groups[2:4]]
    with pytest.raises(UsageError, match=r"3 steps of 2 groups need 6 groups with responses, but there are 5"):
        deal(groups, steps=3, groups_per_step=2)


class LongWords:
    """A tokenizer whose every token is a long word with a quote in it."""

    def get_vocab(self) -> dict[str, int]:
        return {f'{"w" * 90}"{token}': token for token in range(61)}


def test_the_rollouts_file_is_planned_for_the_longest_tokens_and_many_short_responses() -> None:
    for size, tokens, text in ((2, 500, 95), (512, 1, 95), (512, 1, 0)):
        group = SampledGroup(
            prompt=Prompt(token_ids=(1, 2, 3)),
            step=0,
            group=0,
            rollout=RolloutSettings(reward=zero, advantage=lambda s, r: r, group_size=size, max_response_tokens=tokens),
            stop_token_ids=(),
            tokenizer=LongWords() if text else None,
            token_text_bytes=text,
            scale_advantages=True,
            baseline="mean",
        )
        record = StepRecord(step=0, groups=(group,), sampled=SampledSizes())
        number, word = repr(-123.45678901234567e-100), '\\"' + "w" * (text - 1) if text else ""
        row = f"[{', '.join([number] * tokens)}], "
        ids = f"[{', '.join(['1234567890'] * tokens)}]"
        response = f'{{"text": "{word * tokens}", "token_ids": {ids}}}, ' if text else f"{ids}, "
        line = f'{{"prompt": [1, 2, 3], "responses": [{response * size}], "rewards": [{(number + ", ") * size}], '
        line += f'"advantages": [{row * size}], "old_logprobs": [{row * size}], "metadata": {{"step": 0, "group": 0}}}}'
        assert len(line) <= record.value.nbytes <= 2 * len(line)


@pytest.mark.parametrize("name", [5, "", "a\nb", "a\x1b[31mb"])
def test_names_that_can_not_be_printed_are_refused(name: Any) -> None:
    plan = Plan(name="p")
    with pytest.raises(PlanError, match=r"give it a name of printable characters"):
        plan.add(Stage(name=name, kind="k", run=print))
    with pytest.raises(PlanError, match=r"give it a name of printable characters"):
        plan.value(Value(name=name, tensors={"t": TensorSpec(shape=(1,), dtype="float32")}))


@pytest.mark.parametrize("names", [("a", "a/t"), ("a/t", "a"), ("a/t/b", "a"), ("x/a", "x/a/t/u")])
def test_a_value_can_not_be_a_folder_where_another_is_an_array(names: tuple[str, str]) -> None:
    plan = Plan(name="p")
    first, second = (Value(name=name, tensors={"t": TensorSpec(shape=(1,), dtype="float32")}) for name in names)
    plan.value(first)
    with pytest.raises(PlanError, match=r"can't be on disk beside the Value that has"):
        plan.value(second)


def test_values_below_each_others_names_are_fine_where_no_array_is_in_the_way() -> None:
    plan = Plan(name="p")
    for name in ("a", "a/b", "a/b/c", "b/a"):
        plan.value(Value(name=name, tensors={"t": TensorSpec(shape=(1,), dtype="float32")}))
