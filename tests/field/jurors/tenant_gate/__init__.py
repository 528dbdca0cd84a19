from .proxy import Proxy
from .quota import QuotaBook

__all__ = ["Proxy", "QuotaBook"]
