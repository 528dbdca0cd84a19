from __future__ import annotations

import threading


class TokenPermits:
    """Receive-side credit: tokens a peer may have in flight."""

    def __init__(self, total: int) -> None:
        self._left = total
        self._cv = threading.Condition()

    def reserve(self, n: int, timeout: float = 0.0) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._left >= n, timeout):
                return False
            self._left -= n
            return True

    def unreserve(self, n: int) -> None:
        with self._cv:
            self._left += n
            self._cv.notify_all()

    def left(self) -> int:
        return self._left
