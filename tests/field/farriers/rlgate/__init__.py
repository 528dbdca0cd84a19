from .collector import Collector
from .sandbox import SandboxFarm

__all__ = ["Collector", "SandboxFarm"]
