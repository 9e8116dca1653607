"""The engine's half of a PPO step: prompts in, scored responses out.

And validation, which asks the same of other prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.cluster.mesh import ParallelDims
from harness.cluster.world import World
from harness.config.schema import Config
from harness.metrics import Metrics, validation_metrics
from harness.rollout.engine import RolloutEngine
from harness.rollout.responses import Response, check_weight_version, read_responses
from harness.runtime.events import EventLog, quoted, unix_seconds
from harness.seeds import seed_of
from harness.task.data import Prompt, PromptSampler
from harness.task.rewards import Reward
from harness.trainer.batch import Batch, from_sequences, scatter_responses
from harness.trainer.routing import scatter_routing

LEAST_LENGTH = 16
"""How long the responses are at least, in tokens, where a check asks for few."""


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """The engine of a rank, and what it is asked.

    Methods are collective calls of all ranks, but for the two on prompts.
    """

    config: Config
    world: World
    dims: ParallelDims
    events: EventLog
    prompts: PromptSampler
    validation_prompts: Sequence[Prompt]
    tokenizer: Any
    reward: Reward
    engine: RolloutEngine
    routed_shape: tuple[int, int] | None = None
    """Layers, and experts of a token, if the engine is asked which experts each token took (rollout.routing)."""
    validations: dict[int, Metrics] = field(default_factory=dict)
    """Number of updates -> what the validation after them found."""
    first_token_at: float | None = None
    """UNIX seconds when the first step's responses arrived."""

    def generate(self, index: int, weight_version: str | None = None) -> Batch:
        """Return the engine's scored responses to this rank's share of a step's prompts.

        weight_version: raise StaleWeights if one of them was generated with other weights than these.
        """
        with self.events.phase("generate", "the engine's responses; the first of a run may compile kernels"):
            # Engines of one run must not sample alike, and a resumed run must sample as this one does.
            self.engine.seed(seed_of(self.config.run.seed, index, self.engine_number))
            batch = self.batch_of(self.engine_prompts(index), weight_version)
        self.first_token_at = self.first_token_at or unix_seconds()
        return batch

    def respond(self, index: int, most_tokens: int = 0) -> Batch:
        """Return responses to a step's prompts for a check, outside of the step's own rollout.

        most_tokens: ask for about so many tokens over all engines, of fewer prompts and shorter responses.
        """
        prompts = self.engine_prompts(index)
        if not most_tokens:
            return self.batch_of(prompts)
        config, dims = self.config.rollout, self.dims
        rows = max(dims.engine_size, most_tokens // (LEAST_LENGTH * dims.dp))  # every rank needs one
        prompts = prompts[: -(-rows // config.responses_per_prompt)]
        length = most_tokens // (len(prompts) * config.responses_per_prompt * dims.dp)
        return self.batch_of(prompts, most_tokens=max(1, min(length, config.max_response_tokens)))

    def batch_of(
        self, prompts: Sequence[Prompt], weight_version: str | None = None, most_tokens: int | None = None
    ) -> Batch:
        """Return the engine's scored responses, rollout.responses_per_prompt to each of these prompts: this rank's
        share.

        most_tokens: of a response; None for rollout.max_response_tokens.
        """
        config = self.config.rollout
        repeated = [prompt for prompt in prompts for _ in range(config.responses_per_prompt)]
        own, responses, scores = self.responses(repeated, config.sampling, self.routed_shape, most_tokens)
        if weight_version is not None:
            check_weight_version(responses, weight_version)
        pad_id = self.tokenizer.pad_token_id or 0
        batch = from_sequences([prompt.input_ids for prompt in own], [each.token_ids for each in responses], pad_id)
        if self.routed_shape:
            routed = scatter_routing([each.routed_experts for each in responses], self.routed_shape, batch)
            batch = batch.replace(routed_experts=routed)
        return batch.replace(
            group=torch.tensor([prompt.index for prompt in own]),
            scores=torch.tensor(scores, dtype=torch.float32),
            truncated=torch.tensor([each.truncated for each in responses]),
            aborted=torch.tensor([each.aborted for each in responses]),
            weight_version=torch.tensor([each.oldest_weights for each in responses]),
            draft_rounds=torch.tensor([each.draft_rounds for each in responses]),
            rollout_log_probs=scatter_responses([each.log_probs for each in responses], batch),
        )

    @property
    def engine_number(self) -> int:
        """Which of the dp engines this rank's is."""
        return self.dims.coordinates(self.world.rank).dp

    def engine_prompts(self, index: int) -> list[Prompt]:
        """Return the prompts of this rank's engine: the step's prompts are shared out evenly among the dp engines."""
        prompts = self.prompts.batch(index)
        share = len(prompts) // self.dims.dp
        return prompts[self.engine_number * share :][:share]

    def responses(
        self,
        prompts: Sequence[Prompt],
        sampling: Mapping[str, float],
        routed_shape: tuple[int, int] | None = None,
        most_tokens: int | None = None,
    ) -> tuple[Sequence[Prompt], list[Response], list[float]]:
        """Have the engine answer these prompts. Return this rank's share of them, with a response and a score for each.

        prompts: the same on all ranks of an engine. routed_shape: ask which experts each token took.
        """
        if not prompts:  # an engine may have no row of a small validation set
            return [], [], []
        config = self.config.rollout
        ends = {"max_new_tokens": most_tokens or config.max_response_tokens, "ignore_eos": config.ignore_eos}
        stops = {"stop": list(config.stop), "stop_token_ids": list(config.stop_token_ids)}
        answers = self.engine.generate(
            input_ids=[prompt.input_ids for prompt in prompts],
            sampling_params={**sampling, **ends, **{name: some for name, some in stops.items() if some}},
            return_logprob=True,
            **({"return_routed_experts": True} if routed_shape else {}),
        )
        # Every rank of the engine got all answers, and keeps its share.
        size, place = -(-len(prompts) // self.dims.engine_size), self.dims.engine_rank(self.world.rank)
        share = slice(place * size, (place + 1) * size)
        prompts, responses = prompts[share], read_responses(answers[share], config.aborted, routed_shape)
        texts = self.tokenizer.batch_decode([each.token_ids for each in responses], skip_special_tokens=True)
        return prompts, responses, [self.reward(text, prompt.row) for text, prompt in zip(texts, prompts, strict=True)]

    def validate(self, updates: int) -> None:
        """If a validation is due after so many updates, measure the mean reward on the validation set.

        It leaves training as it is: each step seeds the engine anew, and the next sync flushes the prefixes.
        """
        if not self.config.validation.is_due(updates, self.config.run.steps):
            return
        mine = self.validation_prompts[self.engine_number :: self.dims.dp]
        with self.events.phase("validate", "the engine's responses to the validation set"):
            found = validation_metrics(*self.responses(mine, {"temperature": self.config.validation.temperature}))
        self.validations[updates] = found
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if name.startswith("accuracy"))
        self.events.say(f"validation after {updates} updates, {found['rows']} rows: {shown}")


def keep_sample(events: EventLog, tokenizer: Any, batch: Batch) -> str:
    """Write this rank's first prompt and response of a step to its events; return them as a line for the console."""
    ids, is_response = batch.input_ids[0], batch.response_mask[0].bool()
    prompt = ids[batch.attention_mask[0].bool() & ~is_response]
    text, response = tokenizer.batch_decode([prompt, ids[is_response]], skip_special_tokens=True)
    reward = float(batch.require("scores")[0])
    events.fact("sample", step=events.step, prompt=text, response=response, reward=reward)
    return f"a response: {quoted(text, 40)} -> {quoted(response, 80)}  reward {reward:.3f}"
