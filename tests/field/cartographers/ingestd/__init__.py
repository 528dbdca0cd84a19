"""Pulls raw documents from crawl mirrors into tokenised training shards."""
from .fetch import Fetcher
from .limits import HostBucket, Parallel
from .stage import StageArena
from .writer import ShardWriter

__all__ = ["Fetcher", "HostBucket", "Parallel", "StageArena", "ShardWriter"]
