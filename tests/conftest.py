"""What every test of this process needs before it imports transformers."""

import torch

from harness.rollout.cpu.activate import activate

# The published torchvision does not import beside a CPU torch, and transformers imports it. Not a fixture: test modules
# import transformers while they are collected.
if not torch.cuda.is_available():
    activate()
