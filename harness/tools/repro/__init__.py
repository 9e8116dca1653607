"""One command per known failure: the smallest program that fails that way, and a control that passes."""
