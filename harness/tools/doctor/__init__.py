"""Looks at ranks, hosts and links before a run, and names what would make it fail."""
