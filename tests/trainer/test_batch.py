"""Padding, alignment and slicing of the training batch."""

from itertools import chain

import pytest
import torch

from harness.trainer.batch import Batch, from_sequences, scatter_responses


def example() -> Batch:
    return from_sequences([[5, 6], [7], [8, 9, 10]], [[11], [12, 13, 14], [15, 16]], pad_id=3)


def test_from_sequences_pads_on_the_right() -> None:
    batch = example()
    assert batch.input_ids.tolist() == [[5, 6, 11, 3, 3], [7, 12, 13, 14, 3], [8, 9, 10, 15, 16]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch.response_mask.tolist() == [[0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert {tensor.dtype for tensor in batch.tensors().values()} == {torch.int64}


def test_scatter_responses_follows_the_response_mask() -> None:
    aligned = scatter_responses([[-1.0], [-2.0, -3.0, -4.0], [-5.0, -6.0]], example())
    assert aligned.tolist() == [[0, 0, -1, 0, 0], [0, -2, -3, -4, 0], [0, 0, 0, -5, -6]]


def test_a_field_that_is_not_set_is_named() -> None:
    with pytest.raises(KeyError, match="returns"):
        example().require("returns")


def test_minibatches_are_every_row_once_in_an_order_of_the_seed() -> None:
    batch = from_sequences([[2]] * 12, [[row + 3] for row in range(12)], pad_id=0).replace(scores=torch.arange(12.0))

    def orders(seed: int) -> list[list[float]]:
        generator = torch.Generator().manual_seed(seed)
        return [part.require("scores").tolist() for _ in range(2) for part in batch.shuffled(generator).split(4)]

    assert orders(1) == orders(1) != orders(2)
    first, second = orders(1)[:3], orders(1)[3:]
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    part = next(batch.shuffled(torch.Generator().manual_seed(1)).split(4))
    assert (part.input_ids[:, 1] - 3).tolist() == part.require("scores").tolist()


def test_parts_keep_the_order() -> None:
    parts = list(example().split(2))
    assert [len(part) for part in parts] == [2, 1]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), example().input_ids)
