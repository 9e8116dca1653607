"""The weight sync without rollout and updates: verified, or timed."""
