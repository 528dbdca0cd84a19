"""RL rollout workers: sandboxes, device leases and trajectory buffers."""
from .driver import Driver
from .leases import DeviceBoard, WorkerSlots

__all__ = ["DeviceBoard", "Driver", "WorkerSlots"]
