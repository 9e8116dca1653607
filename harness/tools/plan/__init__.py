"""Where the ranks of a run would be, without torch or a GPU."""
