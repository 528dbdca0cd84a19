"""Inference gateway: upstream links, admission by turnstile, and the proxy over both."""
from .links import LinkPool
from .proxy import Proxy
from .turnstile import Turnstile

__all__ = ["LinkPool", "Proxy", "Turnstile"]
