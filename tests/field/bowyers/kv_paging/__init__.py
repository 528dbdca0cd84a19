"""Paged key/value cache of the generation server."""
