"""What every other room stands on: events, phases, errors, the memory gauge, run folders."""
