"""What every test of this process needs before it imports transformers, and before it starts others."""

import signal

import pytest
import torch

from harness.runtime.cpu_standins import activate

# The published torchvision does not import beside a CPU torch, and transformers imports it. Not a fixture: test modules
# import transformers while they are collected.
if not torch.cuda.is_available():
    activate()

# Started in a shell's background this process ignores Ctrl-C, and so would all that tests start and then interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
