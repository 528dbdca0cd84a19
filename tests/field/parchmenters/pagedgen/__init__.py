"""A small paged generation engine used by the rollout unit tests."""
from .engine import GenEngine, Seq
from .pages import PagePool
from .prefix import PinnedPrompts, PrefixCache

__all__ = ["GenEngine", "PagePool", "PinnedPrompts", "PrefixCache", "Seq"]
