"""Finds and repairs memory-pool leaks; imports neither torch nor anything of the audited tree."""

__version__ = "0.1.0"
