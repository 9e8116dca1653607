"""Experiment trackers of a run: TensorBoard and wandb."""
