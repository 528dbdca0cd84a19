from .arena import ChunkArena, Chunk
from .cache import TieredKV
from .engine import LongContextEngine, EngineConfig

__all__ = ["ChunkArena", "Chunk", "TieredKV", "LongContextEngine", "EngineConfig"]
