"""Sharded checkpoint store."""
