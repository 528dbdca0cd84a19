"""Moves KV blocks from prefill hosts to decode hosts."""
from .blocks import BlockPool, PoolEmpty
from .decode import DecodeWorker
from .links import Link, LinkDown
from .relay import Relay, Transfer

__all__ = ["BlockPool", "DecodeWorker", "Link", "LinkDown", "PoolEmpty", "Relay", "Transfer"]
