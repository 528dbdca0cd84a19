"""Rollout workers for reinforcement learning: environments, trajectory rows, episodes, the collection loop."""
from .collector import Collector
from .envs import EnvPool, ResetFailed
from .trajectories import ArenaFull, RowArena, Trajectory, TrajectoryTooLong
