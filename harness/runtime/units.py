"""Units that more than one room counts in."""

GIB, MIB = 1 << 30, 1 << 20
