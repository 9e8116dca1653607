"""Emulate hosts on one machine: namespaces, a network between them, and faults on purpose."""
