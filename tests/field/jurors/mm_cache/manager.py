"""Content-addressed encoder outputs with reference counts."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from .pool import FeaturePool


@dataclass(eq=False)
class Entry:
    digest: str
    buf: torch.Tensor
    refs: int = 0
    length: int = 0


class EncoderCacheManager:
    def __init__(self, pool: FeaturePool) -> None:
        self.pool = pool
        self.entries: dict[str, Entry] = {}

    def addref(self, digest: str) -> Optional[Entry]:
        entry = self.entries.get(digest)
        if entry is not None:
            entry.refs += 1
        return entry

    def unref(self, entry: Entry) -> None:
        entry.refs -= 1

    def evict_idle(self) -> int:
        idle = [e for e in self.entries.values() if e.refs == 0]
        for entry in idle:
            del self.entries[entry.digest]
            self.pool.restore(entry.buf)
        return len(idle)

    def _obtain(self) -> Optional[torch.Tensor]:
        buf = self.pool.obtain()  # clean: handed to the caller
        if buf is None and self.evict_idle():
            buf = self.pool.obtain()  # clean: near miss, only after the first attempt gave None
        return buf

    def store(self, digest: str, features: torch.Tensor) -> bool:
        buf = self._obtain()  # leak: features that are too long or known already return with the buffer
        if buf is None:
            return False
        if digest in self.entries or features.shape[0] > self.pool.tokens:
            return False
        buf[: features.shape[0]].copy_(features)
        self.entries[digest] = Entry(digest, buf, length=features.shape[0])
        return True

    def refresh(self, digest: str, features: torch.Tensor) -> bool:
        old = self.entries.get(digest)
        if old is not None and old.refs:
            return False
        buf = self._obtain()  # clean: near miss, the entry it replaces is popped and its buffer restored
        if buf is None:
            return False
        previous = self.entries.pop(digest, None)
        if previous is not None:
            self.pool.restore(previous.buf)
        buf[: features.shape[0]].copy_(features)
        self.entries[digest] = Entry(digest, buf, length=features.shape[0])
        return True
