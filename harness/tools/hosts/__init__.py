"""Emulated hosts on one machine, the wire between them, and harm on purpose."""
