"""Rewards that need more than a line of arithmetic: MATH, by the data source of a row, and a user's own."""
