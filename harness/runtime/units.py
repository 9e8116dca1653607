"""Units of memory, in bytes."""

GIB, MIB = 1 << 30, 1 << 20
