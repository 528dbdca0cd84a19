"""Modbus gateway: many TCP clients, few serial buses."""
from .bus import BusRegistry, SerialBus
from .transactions import TransactionIds

__all__ = ["BusRegistry", "SerialBus", "TransactionIds"]
