"""The weight sync alone: verified, or timed."""
