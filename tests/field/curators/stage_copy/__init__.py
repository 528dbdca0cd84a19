"""Host-device copies over pooled streams, events and pinned staging blocks."""
from .copier import AsyncCopier, CopyTicket
from .pools import EventPool, StreamLanes
from .staging import StagingLease, StagingPool

__all__ = ["AsyncCopier", "CopyTicket", "EventPool", "StagingLease", "StagingPool", "StreamLanes"]
