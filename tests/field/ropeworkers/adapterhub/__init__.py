"""Adapter residency shared by several engines."""
