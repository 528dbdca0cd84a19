"""Repairs: edits that belong together, applied as one, kept only if the code is better for them."""
