"""In-memory snapshots of the training state, uploaded in the background."""
from .service import SnapshotService
from .slots import Slot, SlotTable

__all__ = ["Slot", "SlotTable", "SnapshotService"]
