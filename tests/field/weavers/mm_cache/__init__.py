from .processor import ImageProcessor
from .store import Embedding, EmbeddingStore

__all__ = ["ImageProcessor", "Embedding", "EmbeddingStore"]
