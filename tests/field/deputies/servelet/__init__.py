from .replica import Replica
from .router import Router

__all__ = ["Replica", "Router"]
