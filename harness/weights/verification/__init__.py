"""The checks that the weights arrived, at the level that weights.verify sets."""
