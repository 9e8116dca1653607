"""Tiny random models of real architectures, with a tokenizer."""
