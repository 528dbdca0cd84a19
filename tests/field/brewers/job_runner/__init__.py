from .broker import GpuBroker
from .locks import KeyLocks, RwGate
from .runner import Job, JobRunner
from .store import JobStore

__all__ = ["GpuBroker", "Job", "JobRunner", "JobStore", "KeyLocks", "RwGate"]
