from .arena import CellArena, LogitBuffers
from .search import BeamSearch

__all__ = ["BeamSearch", "CellArena", "LogitBuffers"]
