"""Expert weights of a mixture model, kept in host memory and cached on the device."""
from .prefetch import Prefetcher
from .store import ExpertStore, FrameTable

__all__ = ["ExpertStore", "FrameTable", "Prefetcher"]
