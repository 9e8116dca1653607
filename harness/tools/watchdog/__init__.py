"""The watchdog of each host: it names the first failure of a run, and ends all that is left of it."""
