"""What a script of launch/ does: import harness from the checkout, with whatever the environment has."""

import sys

import moving

import harness

print(f"{moving.code} in {harness.__name__}")
sys.exit(moving.code)
