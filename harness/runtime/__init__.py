"""What every other room stands on: events, phases, errors, run folders."""

GIB, MIB = 1 << 30, 1 << 20
"""Bytes."""
