"""Thumbnail service: codec contexts, a surface cache and the request queue."""
