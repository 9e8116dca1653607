"""FSDP2 models and the PPO arithmetic."""

from harness.runtime import hf

hf.make_importable()  # model.py imports models of transformers
