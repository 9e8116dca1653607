"""Padding, alignment and slicing of the training batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.config import schema
from harness.trainer.batch import Batch, from_sequences, scatter_responses
from harness.trainer.microbatches import plan_microbatches


def example() -> Batch:
    return from_sequences([[5, 6], [7], [8, 9, 10]], [[11], [12, 13, 14], [15, 16]], pad_id=3)


def test_sequences_are_padded_on_the_right_to_any_width_and_numbers_follow_the_responses() -> None:
    batch = example()
    assert batch.input_ids.tolist() == [[5, 6, 11, 3, 3], [7, 12, 13, 14, 3], [8, 9, 10, 15, 16]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.response_mask.tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert {tensor.dtype for tensor in batch.tensors().values()} == {torch.int64}
    aligned = scatter_responses([[-1.0], [-2.0, -3.0, -4.0], [-5.0, -6.0]], batch)
    assert aligned.tolist() == [[0, 0, -1, 0, 0], [0, -2, -3, -4, 0], [0, 0, 0, -5, -6]]
    with pytest.raises(KeyError, match="returns"):
        batch.require("returns")
    narrow, wide = batch.as_wide_as(4), batch.replace(scores=torch.arange(3.0)).as_wide_as(6)
    assert torch.equal(narrow.input_ids, batch.input_ids[:, :4])
    assert wide.attention_mask.tolist()[2] == [1, 1, 1, 1, 1, 0] and wide.require("scores").tolist() == [0, 1, 2]


def updates(**sizes: Any) -> schema.ActorConfig:
    return schema.ActorConfig(**sizes)


@given(
    st.integers(1, 4).flatmap(
        lambda ranks: st.tuples(
            st.just(ranks),
            st.lists(st.integers(1, 50), min_size=ranks, max_size=8 * ranks).filter(lambda x: len(x) % ranks == 0),
        )
    ),
    st.integers(50, 120),
    st.booleans(),
)
def test_a_token_budget_holds_on_every_rank_and_every_row_is_taken_once(
    setup: tuple[int, list[int]], budget: int, packed: bool
) -> None:
    ranks, lengths = setup
    rows = list(range(len(lengths)))[::-1]
    planned = plan_microbatches(rows, lengths, ranks, updates(tokens_per_microbatch=budget), packed)
    assert sorted(row for parts in planned for part in parts for row in part) == sorted(rows)
    assert all(len(parts) == ranks for parts in planned)
    for part in (part for parts in planned for part in parts):
        own = [lengths[row] for row in part]
        assert 0 < (sum(own) if packed else len(own) * max(own)) <= budget


def test_tokens_are_balanced_over_ranks() -> None:
    lengths = [2 + 97 * number % 61 for number in range(64)]
    planned = plan_microbatches(range(64), lengths, 4, updates(tokens_per_microbatch=256), packed=True)
    tokens = [sum(lengths[row] for parts in planned for row in parts[rank]) for rank in range(4)]
    assert max(tokens) < 1.02 * min(tokens)
    assert len(planned) == -(-sum(lengths) // (4 * 256)), "as few as there can be"


def test_without_a_budget_rows_stay_in_order() -> None:
    planned = plan_microbatches([7, 6, 5, 4, 3, 2], [1] * 8, 2, updates(microbatch_size=2), packed=False)
    assert planned == [[[7, 6], [4, 3]], [[5], [2]]]
    with pytest.raises(ValueError, match="same number of sequences on 2 ranks, got 3"):
        plan_microbatches([0, 1, 2], [1] * 3, 2, updates(), packed=False)
