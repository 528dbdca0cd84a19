"""Reward models behind a queue: device leases, scorers, a client with retries and the worker."""
from .client import RewardClient
from .devices import DeviceBook, FairBook
from .scorers import EnsembleScorer, Scorer
from .worker import Worker

__all__ = ["DeviceBook", "EnsembleScorer", "FairBook", "RewardClient", "Scorer", "Worker"]
