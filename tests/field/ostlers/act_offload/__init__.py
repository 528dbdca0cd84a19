"""Activation offloading to host slabs."""
