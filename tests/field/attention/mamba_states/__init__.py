from .slots import StateSlots
from .mixer import StateMixer

__all__ = ["StateSlots", "StateMixer"]
