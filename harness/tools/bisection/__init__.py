"""Which version broke it: candidates, environments, search, verdicts, state, report."""
