"""Session-aware ranking server."""
from .arena import ArenaSet, Region
from .server import RankServer
from .sessions import SessionStore

__all__ = ["ArenaSet", "RankServer", "Region", "SessionStore"]
