from .decode import DecodeReceiver
from .router import Router

__all__ = ["DecodeReceiver", "Router"]
