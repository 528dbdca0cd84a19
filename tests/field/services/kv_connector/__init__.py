"""KV connector between prefill and decode instances."""
from .connector import DecodeConnector, PrefillConnector
from .pool import BlockPool, PageHandle

__all__ = ["BlockPool", "PageHandle", "PrefillConnector", "DecodeConnector"]
