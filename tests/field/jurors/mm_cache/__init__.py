from .manager import EncoderCacheManager
from .runner import EncoderRunner

__all__ = ["EncoderCacheManager", "EncoderRunner"]
