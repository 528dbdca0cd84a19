"""Small continuous-batching server around one model replica."""
from .engine import Engine
from .request import Request
from .server import Server
from .slots import SlotManager

__all__ = ["Engine", "Request", "Server", "SlotManager"]
