"""Front router of a disaggregated deployment: picks a prefill and a decode worker."""
from .conns import ConnPool, Worker
from .health import Prober
from .leases import SlotBook
from .router import Router

__all__ = ["ConnPool", "Worker", "Prober", "SlotBook", "Router"]
