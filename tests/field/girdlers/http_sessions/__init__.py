"""Outgoing HTTP for the integration service: pooled sessions, a client and the partner calls."""
from .client import Client
from .sessions import Session, SessionPool

__all__ = ["Client", "Session", "SessionPool"]
