"""FSDP2 models and the PPO arithmetic."""
