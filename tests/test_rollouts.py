"""What a PPO step asks of an engine, and the metrics of its responses, on one rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cluster.mesh import ParallelDims
from harness.cluster.world import World
from harness.metrics import accept_length, replay_metrics, response_metrics, routing_metrics, validation_metrics
from harness.rollout.responses import Response, StaleWeights
from harness.rollouts import Rollouts
from harness.runtime.events import EventLog
from harness.task.data import Prompt, PromptSampler, Row
from harness.tools.command_line import parse
from harness.trainer.batch import from_sequences

pytestmark = pytest.mark.usefixtures("alone")


def prompt(index: int, source: str = "") -> Prompt:
    return Prompt(index, [index + 2], Row(prompt="?", ground_truth="", where="here", data_source=source))


def response(*token_ids: int, truncated: bool = False) -> Response:
    return Response(list(token_ids), [0.0] * len(token_ids), truncated)


class Tokenizer:
    pad_token_id = 0

    def batch_decode(self, sequences: Sequence[Sequence[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, each)) for each in sequences]


class EchoEngine:
    """Answers each prompt with its first token, and remembers what it was asked."""

    def seed(self, number: int) -> None:
        """Nothing here is drawn."""

    def __init__(self, **told: str) -> None:
        """told: in the meta_info of each answer."""
        self.told = told
        self.asked: list[list[list[int]]] = []
        self.sampling: list[Mapping[str, Any]] = []

    def generate(
        self, *, input_ids: list[list[int]], sampling_params: Mapping[str, Any], return_logprob: bool
    ) -> list[Any]:
        self.asked.append(input_ids)
        self.sampling.append(sampling_params)
        ends = [
            {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(-0.5, ids[0], None)]} for ids in input_ids
        ]
        return [{"output_ids": ids[:1], "meta_info": end | self.told} for ids, end in zip(input_ids, ends, strict=True)]


def rank_of(words: str, rank: int, engine: Any, folder: Path) -> Rollouts:
    """A rank of a mesh whose other ranks this test does not need."""
    config = parse(words.split()).config
    dims = ParallelDims.of(config.parallel)
    world = World(
        rank=rank, world_size=dims.world_size, local_rank=rank, host="here", device=torch.device("cpu"), locations=()
    )
    prompts = [prompt(index) for index in range(8)]
    return Rollouts(
        config=config,
        world=world,
        dims=dims,
        events=EventLog(folder / "events.jsonl", rank, "here"),
        prompts=PromptSampler(prompts, config.rollout.prompts_per_step, seed=0),
        validation_prompts=prompts[:5],
        tokenizer=Tokenizer(),
        reward=lambda text, row: float(text == "2"),
        engine=engine,
    )


def test_engines_share_out_the_prompts_and_the_ranks_of_an_engine_its_responses(tmp_path: Path) -> None:
    engine, words = EchoEngine(), "--parallel.dp 2 --parallel.tp 2 --rollout.prompts_per_step 4"
    batches = [rank_of(words, rank, engine, tmp_path).generate(0) for rank in range(4)]
    first, again, second, _ = engine.asked
    assert first == again and len(first) == 4, "two prompts, two responses each"
    assert not {ids[0] for ids in first} & {ids[0] for ids in second}
    echoed = [batch.input_ids[:, 1].tolist() for batch in batches]
    assert echoed[0] + echoed[1] == [ids[0] for ids in first] and len(echoed[0]) == 2
    assert batches[0].require("group").tolist() == [token - 2 for token in echoed[0]]
    assert batches[0].require("rollout_log_probs")[:, 1].tolist() == [-0.5, -0.5]
    assert batches[0].require("scores").tolist() == [float(token == 2) for token in echoed[0]]


def test_the_weights_of_a_response_are_those_of_the_step(tmp_path: Path) -> None:
    ppo = rank_of("--parallel.tp 1", 0, EchoEngine(weight_version="3"), tmp_path)
    batch = ppo.generate(3, "3")
    assert batch.require("weight_version").tolist() == [3] * len(batch)
    assert response_metrics(batch)["weight_version"] == 3
    with pytest.raises(StaleWeights, match="of version 3, but this step's sync brought version 4"):
        ppo.generate(4, "4")
    silent = rank_of("--parallel.tp 1", 0, EchoEngine(), tmp_path).generate(4, "4")
    assert set(silent.require("weight_version").tolist()) == {-1} and "weight_version" not in response_metrics(silent)


def test_each_engine_validates_on_its_share_at_the_temperature_of_validation(tmp_path: Path) -> None:
    engine = EchoEngine()
    ppo = rank_of("--parallel.dp 2 --parallel.tp 1 --run.steps 3 --validation.source arithmetic", 0, engine, tmp_path)
    ppo.validate(2)
    assert engine.asked == [], "it is due after the last step alone"
    ppo.validate(3)
    assert engine.asked == [[[2], [4], [6]]] and engine.sampling[0]["temperature"] == 0.0
    assert ppo.validations[3]["accuracy"] == pytest.approx(1 / 3) and ppo.validations[3]["rows"] == 3


def test_a_steps_metrics_tell_how_long_responses_are_and_how_many_did_not_end() -> None:
    batch = from_sequences([[2]] * 4, [[5], [5, 6, 7], [], [5, 6, 7, 8]], pad_id=0).replace(
        scores=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        truncated=torch.tensor([False, True, False, False]),
        aborted=torch.tensor([False, False, True, False]),
    )
    assert response_metrics(batch) == {
        "reward_mean": 0.5,
        "response_tokens_mean": 2.0,
        "response_tokens_min": 0.0,
        "response_tokens_max": 4.0,
        "response_tokens": 8.0,
        "tokens": 12.0,
        "truncated_share": 0.25,
        "aborted_share": 0.25,
    }


def test_routing_is_measured_over_response_tokens_of_which_the_engine_told() -> None:
    batch = from_sequences([[2, 3]] * 2, [[5, 6, 7], [5, 6, 7]], pad_id=0)
    differing = torch.tensor([[9.0, 9.0, 0.0, 2.0, 1.0], [9.0, 9.0, 0.0, -1.0, -1.0]])
    found = routing_metrics(batch, differing, layers=3)
    assert found == {
        "routing/token_share": 2 / 4,
        "routing/layer_share": 3 / (4 * 3),
        "routing/compared_share": 4 / 6,
    }
    nothing = routing_metrics(batch, torch.full((2, 5), -1.0), layers=3)
    assert nothing == {"routing/token_share": 0.0, "routing/layer_share": 0.0, "routing/compared_share": 0.0}


def test_a_replay_is_measured_before_and_after() -> None:
    batch = from_sequences([[2]], [[5, 6]], pad_id=0)
    batch = batch.replace(rollout_log_probs=torch.tensor([[0.0, -1.0, -2.0]]))
    found = replay_metrics(batch, torch.tensor([[0.0, -1.5, -2.5]]), torch.tensor([[0.0, -1.25, -2.25]]))
    assert found == pytest.approx(
        {
            "routing/log_prob_difference_before_replay": 0.5,
            "routing/log_prob_difference_after_replay": 0.25,
            "routing/log_probs_moved_by_replay": 0.25,
        }
    )


def test_validation_has_an_accuracy_for_each_data_source() -> None:
    prompts = [prompt(0, "a"), prompt(1, "b"), prompt(2, "b"), prompt(3)]
    responses = [response(5), response(5, 6, truncated=True), response(5, 6, 7), response(5, 6)]
    assert validation_metrics(prompts, responses, [1.0, 0.0, 1.0, 0.0]) == {
        "accuracy": 0.5,
        "accuracy/a": 1.0,
        "accuracy/b": 0.5,
        "response_tokens_mean": 2.0,
        "truncated_share": 0.25,
        "rows": 4,
    }


@pytest.mark.parametrize(
    ("words", "due"),
    [
        ("", []),
        ("--validation.source arithmetic", [6]),
        ("--validation.source arithmetic --validation.every 4", [4, 6]),
        ("--validation.source arithmetic --validation.every 3 --validation.before_train true", [0, 3, 6]),
    ],
)
def test_when_to_validate(words: str, due: list[int]) -> None:
    validation = parse(words.split()).config.validation
    assert [index for index in range(7) if validation.is_due(index, steps=6)] == due


def test_the_accepted_length_counts_tokens_after_the_first_for_each_verification() -> None:
    batch = from_sequences([[5], [5], [5]], [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2]], 0)
    assert accept_length(batch) == {}
    assert accept_length(batch.replace(draft_rounds=torch.zeros(3, dtype=torch.int64))) == {}
    # Four tokens in two verifications, two in two; the third response had no draft model's help.
    assert accept_length(batch.replace(draft_rounds=torch.tensor([2, 2, 0]))) == {"speculation/accept_length": 1.5}
