from .search import Searcher
from .segments import SegmentStore

__all__ = ["Searcher", "SegmentStore"]
