"""Bytes of an exchange: what its plan sends, and the least that any could."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import torch

from harness.weights.pull.exchange import Need, PullBatch
from harness.weights.tensor_view import span


def sent_bytes(batches: Iterable[PullBatch]) -> Counter[int]:
    """Return the bytes that each trainer rank sends."""
    return _total((each.need.owner, each.need.nbytes) for batch in batches for each in batch.parcels)


def received_bytes(batches: Iterable[PullBatch], islands: Mapping[int, Hashable]) -> Counter[Hashable]:
    """Return the bytes that arrive in each island."""
    return _total((islands[each.receiver], each.need.nbytes) for batch in batches for each in batch.parcels)


def least_bytes(needs: Mapping[int, Iterable[Need]], islands: Mapping[int, Hashable]) -> Counter[Hashable]:
    """Return the bytes of the distinct elements that each island needs: no exchange can send fewer.

    Slow: marks every element of every shard, one shard at a time.
    """
    boxes: dict[tuple[Hashable, int, str, torch.dtype], set[Need]] = defaultdict(set)
    for rank, each in needs.items():
        for need in each:
            boxes[islands[rank], need.owner, need.elements.of, need.elements.dtype].add(need)

    def marked(box: set[Need]) -> int:
        views = [replace(need.elements, dtype=torch.bool) for need in box]
        mask = torch.zeros(max(view.offset + span(view.shape, view.stride) for view in views), dtype=torch.bool)
        for view in views:
            view.in_memory(mask).fill_(True)
        return int(mask.sum())

    return _total((island, marked(box) * dtype.itemsize) for (island, _, _, dtype), box in boxes.items())


def _total(amounts: Iterable[tuple[Hashable, int]]) -> Counter:
    total: Counter = Counter()
    for key, nbytes in amounts:
        total[key] += nbytes
    return total
