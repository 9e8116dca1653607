"""Run inside SGLang's schedulers, as a custom weight loader: makes them slow readers of the weight stream."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.weights.worker.reader import SlotReader

SLOW_DOWN = "tests.weights.faults_in_scheduler.slow_down"

await_filled: Callable[[SlotReader, int], None] = SlotReader._await_filled


def slow_down(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """The first name is a number of seconds: that long a reader lets each filled slot lie before it reads it."""
    seconds = float(named_tensors[0][0])

    def await_filled_and_linger(reader: SlotReader, index: int) -> None:
        await_filled(reader, index)
        time.sleep(seconds)

    SlotReader._await_filled = await_filled_and_linger if seconds else await_filled  # type: ignore[method-assign,assignment]
