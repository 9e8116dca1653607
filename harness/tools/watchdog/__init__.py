"""What goes wrong: noticed by a watchdog on each host, the first of it told, and all that is left of the run ended."""
