from .embed_cache import EmbedCache
from .processor import MMProcessor
from .scheduler import MMScheduler
from .types import MMRequest

__all__ = ["EmbedCache", "MMProcessor", "MMRequest", "MMScheduler"]
