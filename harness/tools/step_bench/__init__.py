"""Whole PPO steps, timed by phase, each beside its limit."""
