from .loader import ShardLoader
from .staging import StagingRing
from .tickets import TicketBooth

__all__ = ["ShardLoader", "StagingRing", "TicketBooth"]
