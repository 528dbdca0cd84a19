"""Hands prompts to prefill nodes and their KV to decode nodes."""
from .blocks import BlockLedger, NotEnough
from .links import LinkSet
from .router import Router

__all__ = ["BlockLedger", "LinkSet", "NotEnough", "Router"]
