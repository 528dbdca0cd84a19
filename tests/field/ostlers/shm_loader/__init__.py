"""Batches through shared memory slots."""
from .loader import BatchLoader
from .slots import SlotTable

__all__ = ["BatchLoader", "SlotTable"]
