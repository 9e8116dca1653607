"""Name the known failure behind a log."""
