"""Prompts and the rules that score responses."""
