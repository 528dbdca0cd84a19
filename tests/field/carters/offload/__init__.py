from .engine import OffloadEngine
from .pages import HostPages, PageLease

__all__ = ["HostPages", "OffloadEngine", "PageLease"]
