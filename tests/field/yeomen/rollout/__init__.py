"""Rollouts for RL fine-tuning: environments, generation slots, experience blocks."""
from .collector import Collector
from .envpool import EnvPool
from .learner import Learner
from .storage import BlockRing, SlotBoard

__all__ = ["BlockRing", "Collector", "EnvPool", "Learner", "SlotBoard"]
