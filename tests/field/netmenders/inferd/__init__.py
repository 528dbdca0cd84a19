"""inferd: asyncio front of a continuous-batching engine."""
from .engine import Engine
from .service import Service
from .slots import SeqSlots

__all__ = ["Engine", "SeqSlots", "Service"]
