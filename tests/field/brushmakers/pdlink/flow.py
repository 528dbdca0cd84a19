"""Flow control: a window of bytes in flight, wrapped as a context manager."""
from __future__ import annotations

import threading
from typing import Optional


class Window:
    def __init__(self, nbytes: int) -> None:
        self.total = nbytes
        self.open = nbytes
        self.cv = threading.Condition()

    def admit(self, n: int, timeout: Optional[float] = None) -> bool:
        with self.cv:
            if not self.cv.wait_for(lambda: self.open >= n, timeout):
                return False
            self.open -= n
            return True

    def credit(self, n: int) -> None:
        with self.cv:
            self.open += n
            self.cv.notify_all()


class Share:
    """with Share(window, n) as ok: ..."""

    def __init__(self, window: Window, n: int) -> None:
        self.window = window
        self.n = n
        self.ok = False

    def __enter__(self) -> bool:
        self.ok = self.window.admit(self.n, timeout=1.0)  # clean: near miss, __exit__ returns early only when nothing was admitted
        return self.ok

    def __exit__(self, et, ev, tb) -> bool:
        if not self.ok:
            return False
        self.window.credit(self.n)
        return False


class BurstShare:
    """Like Share, but what was not sent is kept for the next burst."""

    def __init__(self, window: Window, n: int) -> None:
        self.window = window
        self.n = n
        self.sent = 0

    def __enter__(self) -> "BurstShare":
        self.window.admit(self.n)  # leak: __exit__ returns without credit when nothing was sent
        return self

    def __exit__(self, et, ev, tb) -> bool:
        if self.sent == 0:
            return False
        self.window.credit(self.n)
        return False
