"""Pushes fresh policy weights from the trainer ranks to the rollout engines."""
from .versions import VersionTable, ReadLease
from .trainer import WeightPublisher
from .engine import RolloutEngine

__all__ = ["VersionTable", "ReadLease", "WeightPublisher", "RolloutEngine"]
