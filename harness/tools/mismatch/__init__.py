"""Where a difference between the log-probs of engine and trainer comes from."""
