"""The learner's side: FSDP2 models and the PPO arithmetic."""
