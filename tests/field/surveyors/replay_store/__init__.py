from .chunks import Chunk, ChunkPool
from .learner import Learner
from .table import ReplayTable

__all__ = ["Chunk", "ChunkPool", "Learner", "ReplayTable"]
