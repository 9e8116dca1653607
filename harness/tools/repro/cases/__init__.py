"""The failures that can be had on purpose, a module for each family: each case is a program that fails, and data about
it."""
