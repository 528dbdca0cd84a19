"""Containerised environments for multi-turn rollouts."""
from .farm import Env, EnvFarm, PortRange
from .sessions import SessionTable, guarded_env
from .runner import EpisodeRunner, VectorRollout

__all__ = ["Env", "EnvFarm", "PortRange", "SessionTable", "guarded_env", "EpisodeRunner", "VectorRollout"]
