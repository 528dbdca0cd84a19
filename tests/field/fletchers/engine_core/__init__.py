from .engine import Engine
from .request import Request, Status

__all__ = ["Engine", "Request", "Status"]
