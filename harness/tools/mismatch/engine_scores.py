"""An engine's log-probs of tokens that it is given: it computes them by prefill, from the prefix cache or without
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from harness.rollout.engine import RolloutEngine
from harness.rollout.engine_ranks import Group
from harness.trainer.batch import Batch, scatter_responses

T = TypeVar("T")

How = Literal["together", "one by one", "cached prefix"]
WAYS: tuple[How, ...] = ("together", "one by one", "cached prefix")
SAMPLING = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineScores:
    """What an engine said about sequences that it was given."""

    log_probs: Tensor
    """Float [B, T], aligned as Batch says, at temperature 1."""
    wrong_tokens: list[str]
    """Sentences on sequences whose tokens came back changed."""


def sequences_of(batch: Batch) -> list[tuple[list[int], int]]:
    """Return the token ids of each row, prompt and response, and how many of them are the response."""
    rows = zip(batch.input_ids, batch.attention_mask.bool(), batch.response_mask, strict=True)
    return [(ids[kept].tolist(), int(response.sum())) for ids, kept, response in rows]


class Call(Protocol):
    """Makes calls of one engine, on all ranks that wait for its answers."""

    def __call__(self, work: Callable[[RolloutEngine], T]) -> T | None:
        """Return work(this rank's engine); None on a rank that does not use the engine."""


def calling(engine: RolloutEngine) -> Call:
    """Return what makes calls of an engine that every rank uses, and whose death ends the run."""

    def call(work: Callable[[RolloutEngine], T]) -> T:
        return work(engine)

    return call


def engine_scores(group: Group, call: Call, batch: Batch, how: How = "together") -> EngineScores:
    """Return what an engine computes for the rows of all ranks of a group, by prefill. A collective call of the group.

    call: the group's head must use the engine. how: "together" and "one by one" start from an empty prefix cache, and
    use no prefix even if it could not be emptied; "cached prefix" fills an empty cache with the prompts and takes them
    from it.
    """
    by_rank = group.all_gather(sequences_of(batch))
    everything = [row for rows in by_rank.values() for row in rows]
    answers = group.broadcast(call(partial(_ask, rows=everything, how=how)) or [])
    start = sum(len(rows) for rank, rows in by_rank.items() if rank < group.rank)
    mine = answers[start : start + len(batch)]
    wrong = [
        other for (ids, _), answer in zip(everything, answers, strict=True) if (other := changed_token(ids, answer))
    ]
    kept = [
        [log_prob for log_prob, _ in answer][-count:] if count else []
        for answer, (_, count) in zip(mine, sequences_of(batch), strict=True)
    ]
    return EngineScores(log_probs=scatter_responses(kept, batch), wrong_tokens=wrong)


def changed_token(ids: Sequence[int], answer: Sequence[tuple[float, int]]) -> str:
    """Return a sentence on the first token that came back as another one; "" if none did.

    0 may be any large id: SGLang reports the last id of a vocabulary as 0 (x if x < vocab_size - 1 else 0, in its
    processor of log-probs), although it has scored the right one.
    """
    given = ids[len(ids) - len(answer) :]
    for token, (_, returned) in zip(given, answer, strict=True):
        if returned not in (token, 0):
            return f"the engine scored token {returned} where it was given {token}"
    return ""


def _ask(engine: RolloutEngine, rows: Sequence[tuple[list[int], int]], how: How) -> list[list[tuple[float, int]]]:
    """Return (log-prob, token id) of the last tokens of each row: at least of its response."""
    prompts = [max(0, len(ids) - count - 1) for ids, count in rows]
    engine.flush_cache()
    if how == "one by one":
        answers = []
        for row in rows:
            answers += _generate(engine, [row], [0])
            engine.flush_cache()
    elif how == "cached prefix":
        _generate(engine, rows, [0] * len(rows))
        answers = _generate(engine, rows, prompts)
    else:
        answers = _generate(engine, rows, [0] * len(rows))
    return _scores(answers)


def _scores(answers: Sequence[dict[str, Any]]) -> list[list[tuple[float, int]]]:
    return [
        [
            (float(log_prob), int(token))
            for log_prob, token, *_ in answer["meta_info"]["input_token_logprobs"]
            if log_prob is not None
        ]
        for answer in answers
    ]


def _generate(engine: Any, rows: Sequence[tuple[list[int], int]], starts: list[int]) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = engine.generate(
        input_ids=[ids for ids, _ in rows], sampling_params=SAMPLING, return_logprob=True, logprob_start_len=starts
    )
    return answers
