"""Examine ranks, hosts and links before a run, and name what would make it fail."""
