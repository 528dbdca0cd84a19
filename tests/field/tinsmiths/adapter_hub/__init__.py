"""Adapters: host cache, device banks, and the runner that uses both."""
from .hub import AdapterHub
from .runner import LoraRunner

__all__ = ["AdapterHub", "LoraRunner"]
