"""One command per known failure: the smallest real thing that fails that way, beside its healthy control."""
