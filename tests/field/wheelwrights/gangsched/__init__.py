"""Gang scheduling of retrieval index builds and trainers on shared hosts."""
from .leases import HostLeases, Lease
from .runner import GangRunner
from .store import LeaseTable

__all__ = ["GangRunner", "HostLeases", "Lease", "LeaseTable"]
