from .store import EmbeddingStore, EncoderBudget
from .runner import EncoderRunner, Prompt

__all__ = ["EmbeddingStore", "EncoderBudget", "EncoderRunner", "Prompt"]
