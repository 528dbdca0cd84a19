"""Multimodal front: decode images to pooled canvases, encode them, splice the embeddings."""
from .canvas import CanvasPool, CountedCanvases
from .pipeline import Pipeline

__all__ = ["CanvasPool", "CountedCanvases", "Pipeline"]
