"""The failures that can be had on purpose, one module each: what it is as data, and the program that fails."""
