"""One trial: a command, run in an environment, and judged by the signature of a failure."""
