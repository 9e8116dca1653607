"""transformers beside a CPU build of torch: its models import torchvision, whose published build does not load there."""

import sys

from harness.rollout.cpu.activate import activate, torch_is_for_cpu


def make_importable() -> None:
    """Call it before a model of transformers is imported. Does nothing beside a CUDA build, or once torchvision is there."""
    if "torchvision" not in sys.modules and torch_is_for_cpu():
        activate()
