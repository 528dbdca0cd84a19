"""Transfers of camera frames over a DMA engine."""
from .engine import TransferEngine
from .slots import Descriptor, SlotTable

__all__ = ["Descriptor", "SlotTable", "TransferEngine"]
