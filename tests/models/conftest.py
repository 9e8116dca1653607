"""The published torchvision does not import beside a CPU torch, and transformers imports it."""

import torch

from harness.rollout.cpu.activate import activate

if not torch.cuda.is_available():
    activate()
