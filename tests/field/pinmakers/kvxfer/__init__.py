"""kvxfer: moves KV pages from prefill workers to decode workers."""
from .pages import PageBook
from .links import LinkPool
from .sender import Sender
from .receiver import Receiver

__all__ = ["PageBook", "LinkPool", "Sender", "Receiver"]
