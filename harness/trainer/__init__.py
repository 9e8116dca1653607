"""FSDP2 models and the PPO arithmetic."""

from harness.runtime.cpu_standins import make_transformers_importable

make_transformers_importable()  # model.py imports models of transformers
