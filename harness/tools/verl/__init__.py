"""A command line of verl's PPO trainer, written as a config of this harness."""
