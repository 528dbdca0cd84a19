"""RL rollout farm: generation engines are leased, weights are broadcast through staging slots."""
from .engines import EngineLease, EnginePool
from .rollout import RolloutManager
from .weights import StagingRing, WeightSync

__all__ = ["EngineLease", "EnginePool", "RolloutManager", "StagingRing", "WeightSync"]
