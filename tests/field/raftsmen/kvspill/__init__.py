"""Paged KV for long-context training rollouts, with spilling to the host."""
from .blocks import DeviceBlocks, HostBlocks
from .scheduler import Rollouts
from .spill import Spiller

__all__ = ["DeviceBlocks", "HostBlocks", "Rollouts", "Spiller"]
