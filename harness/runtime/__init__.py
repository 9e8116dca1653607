"""What every other room stands on: events, phases, errors, run folders."""
