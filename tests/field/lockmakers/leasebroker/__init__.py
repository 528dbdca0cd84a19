"""Device leases for the training fleet, with fencing tokens and a watchdog."""
from .broker import Broker, Lease
from .store import LeaseStore
from .watchdog import Watchdog
from .worker import Worker

__all__ = ["Broker", "Lease", "LeaseStore", "Watchdog", "Worker"]
