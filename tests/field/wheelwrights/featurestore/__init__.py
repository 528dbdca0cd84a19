"""Feature blocks on their way from the store to the trainer."""
from .batcher import Batcher
from .pipeline import Pipeline
from .pool import Block, BlockPool

__all__ = ["Batcher", "Block", "BlockPool", "Pipeline"]
