from .core import EngineCore
from .kv import KVCacheManager
from .request import Request, Status

__all__ = ["EngineCore", "KVCacheManager", "Request", "Status"]
