from .engine import LLMEngine

__all__ = ["LLMEngine"]
