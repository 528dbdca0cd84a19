"""Sharded tensor files: a JSON header, then raw little-endian data."""
