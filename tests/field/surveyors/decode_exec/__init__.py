from .executor import DecodeExecutor
from .resources import KVCacheManager, SeqSlotManager
from .types import LlmRequest, RequestState

__all__ = ["DecodeExecutor", "KVCacheManager", "LlmRequest", "RequestState", "SeqSlotManager"]
