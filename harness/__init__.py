"""A torchrun SPMD harness for SGLang reinforcement learning, without Ray."""
