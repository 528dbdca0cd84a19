"""A small paged key value cache server for decoder models."""
