from .controller import RolloutController
from .resources import ReplicaLeases, WeightVersions

__all__ = ["RolloutController", "ReplicaLeases", "WeightVersions"]
