"""Pinned staging buffers for host-to-device traffic."""
