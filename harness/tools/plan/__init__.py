"""Where the ranks of a run would be and how much memory its GPUs need, without torch or a GPU."""
