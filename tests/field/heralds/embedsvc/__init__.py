"""Embedding service: texts are tokenised into rows of one pinned tensor and
run through the model in batches."""
from .service import EmbedService

__all__ = ["EmbedService"]
