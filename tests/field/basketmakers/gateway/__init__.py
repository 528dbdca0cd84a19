"""Inference gateway: tenant permits, upstream workers and streamed sessions."""
from .handlers import Gateway
from .permits import PermitBook

__all__ = ["Gateway", "PermitBook"]
