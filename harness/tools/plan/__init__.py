"""The placement of a run and the memory of its GPUs, from config and shapes alone: no torch, no network."""
