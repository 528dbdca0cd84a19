from .slots import ActivationSlot, SlotPool
from .stage import Stage
from .schedule import OneFOneB

__all__ = ["ActivationSlot", "SlotPool", "Stage", "OneFOneB"]
