# take: P.borrow(n)
# give: P.hand_back(X)
# gets: value
# type: PinnedArena
import logging
import threading
from collections import defaultdict

import torch

logger = logging.getLogger(__name__)
_MIN_CLASS = 4096


def _size_class(nbytes):
    c = _MIN_CLASS
    while c < nbytes:
        c <<= 1
    return c


class PinnedArena:
    """Recycles page-locked host buffers, bucketed by power of two."""

    def __init__(self):
        self._lock = threading.Lock()
        self._by_class = defaultdict(list)
        self.hits = self.misses = 0
        self.pinned_bytes = 0

    def borrow(self, nbytes):
        cls = _size_class(nbytes)
        with self._lock:
            shelf = self._by_class[cls]
            if shelf:
                self.hits += 1
                return shelf.pop()
            self.misses += 1
            self.pinned_bytes += cls
        logger.debug("pinning %d fresh bytes", cls)
        return torch.empty(cls, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def hand_back(self, buf):
        with self._lock:
            self._by_class[buf.numel()].append(buf)
