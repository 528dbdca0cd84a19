"""Speculative decoding with a tree of draft tokens."""
