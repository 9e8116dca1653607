"""What a run would take of each GPU, from shapes alone: no torch, no transformers, no network."""
