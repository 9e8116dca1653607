"""What stands around a run; imports the reference, never the other way."""
