"""Snapshot service: several jobs write checkpoints through one daemon."""
from .daemon import SnapshotDaemon
from .leases import LeaseBoard, UploadSlots

__all__ = ["SnapshotDaemon", "LeaseBoard", "UploadSlots"]
