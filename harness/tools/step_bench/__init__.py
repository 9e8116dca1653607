"""Whole PPO steps, timed by phase and compared with what the machine could do."""
