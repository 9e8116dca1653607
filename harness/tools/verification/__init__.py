"""What weights.verify = "full" adds to a run, and the section on its syncs in the report."""
