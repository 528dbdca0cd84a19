"""Session pool for a storage backend."""
from __future__ import annotations

import queue
from typing import Dict, Optional


class StoreSession:
    def __init__(self, number: int):
        self.number = number
        self.broken = False
        self.blobs: Dict[str, bytes] = {}

    def read(self, key: str) -> Optional[bytes]:
        return self.blobs.get(key)

    def write(self, key: str, value: bytes) -> bool:
        if self.broken:
            return False
        self.blobs[key] = value
        return True

    def reset(self) -> None:
        self.broken = False


class SessionPool:
    def __init__(self, size: int):
        self._q: "queue.Queue[StoreSession]" = queue.Queue()
        for i in range(size):
            self._q.put(StoreSession(i))

    def checkout(self, wait: float = 0.5) -> Optional[StoreSession]:
        try:
            return self._q.get(timeout=wait)  # clean: returned to the caller
        except queue.Empty:
            return None

    def checkout_working(self, wait: float = 0.5) -> Optional[StoreSession]:
        """As checkout; broken sessions are reset first."""
        try:
            s = self._q.get(timeout=wait)  # clean: near miss, a broken one is reset and returned like the others
        except queue.Empty:
            return None
        if s.broken:
            s.reset()
        return s

    def checkin(self, s: StoreSession) -> None:
        self._q.put(s)
