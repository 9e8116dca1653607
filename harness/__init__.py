"""A torchrun SPMD harness for SGLang reinforcement learning, without Ray."""

__version__ = "0.1.0"
