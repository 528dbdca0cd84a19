from .core import Lease, Pool
from .keyed import KeyedPools
from .workers import WarmWorkers

__all__ = ["KeyedPools", "Lease", "Pool", "WarmWorkers"]
