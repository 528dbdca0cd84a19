from .store import RunStore
from .writer import MetricWriter

__all__ = ["RunStore", "MetricWriter"]
