"""A run as one file to paste, without this package, and as the text of an issue."""
