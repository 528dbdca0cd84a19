from .loader import CheckpointLoader
from .plan import LoadPlan
from .store import ObjectStore

__all__ = ["CheckpointLoader", "LoadPlan", "ObjectStore"]
