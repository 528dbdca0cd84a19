from __future__ import annotations

import hashlib
import logging
from typing import Dict, List, Optional

from .embed_cache import EmbedCache

logger = logging.getLogger(__name__)


class MMProcessor:
    """Encodes media into embedding slots; equal images share a slot."""

    def __init__(self, cache: EmbedCache) -> None:
        self.cache = cache
        self._seen: Dict[str, int] = {}

    def encode(self, media: bytes) -> Optional[int]:
        slot = self.cache.lease()  # clean: returned to the caller
        if slot is None:
            return None
        self.cache.store(slot, list(media[:8]))
        return slot

    def encode_many(self, media: List[bytes]) -> Optional[List[int]]:
        slots: List[int] = []
        try:
            for item in media:
                if not item:
                    raise ValueError("empty media")
                slot = self.encode(item)  # clean: near miss, the handler unleases what was collected
                if slot is None:
                    raise MemoryError("embedding cache full")
                slots.append(slot)
        except (ValueError, MemoryError) as exc:
            logger.info("batch refused: %s", exc)
            for slot in slots:
                self.cache.unlease(slot)
            return None
        return slots

    def encode_shared(self, media: bytes) -> Optional[int]:
        """The slot of `media`, with one use counted for the caller; the index keeps one use of its own."""
        digest = hashlib.sha1(media).hexdigest()
        slot = self._seen.get(digest)
        if slot is None:
            slot = self.encode(media)  # clean: kept in the index until flush
            if slot is None:
                return None
            self._seen[digest] = slot
        self.cache.addref(slot)  # clean: handed to the caller with the slot
        return slot

    def flush(self) -> None:
        while self._seen:
            _, slot = self._seen.popitem()
            self.cache.unlease(slot)

    def similarity(self, left: bytes, right: bytes) -> float:
        a = self.encode_shared(left)  # leak: not unleased when the right one finds no slot
        if a is None:
            return 0.0
        b = self.encode_shared(right)  # clean: unleased before the return
        if b is None:
            return 0.0
        same = sum(x == y for x, y in zip(self.cache.row(a), self.cache.row(b)))
        self.cache.unlease(a)
        self.cache.unlease(b)
        return same / 8
