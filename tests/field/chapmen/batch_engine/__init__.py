"""Continuous batching engine: slots, requests and the step loop."""
from .engine import Engine
from .request import Request, Status
from .slots import OutputBuffers, SlotTable

__all__ = ["Engine", "Request", "Status", "OutputBuffers", "SlotTable"]
