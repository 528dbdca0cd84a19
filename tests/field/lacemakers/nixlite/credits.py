"""Send credits of a queue pair. The receiver's acknowledgements earn them back."""
from __future__ import annotations

import threading


class CreditLine:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._left = depth
        self._cv = threading.Condition()

    def spend(self, n: int = 1, wait: float | None = None) -> bool:
        with self._cv:
            if not self._cv.wait_for(lambda: self._left >= n, timeout=wait):
                return False
            self._left -= n
            return True

    def earn(self, n: int = 1) -> None:
        with self._cv:
            self._left = min(self._left + n, self.depth)
            self._cv.notify_all()


class TwoLines:
    """Control and data credits of one peer, spent together."""

    def __init__(self, control: CreditLine, data: CreditLine) -> None:
        self.control = control
        self.data = data

    def spend_both(self, n: int) -> bool:
        if not self.control.spend(1, wait=0.2):  # clean: near miss, earned back when the data line is short
            return False
        if not self.data.spend(n, wait=0.2):  # clean: the caller earns both back
            self.control.earn(1)
            return False
        return True

    def earn_both(self, n: int) -> None:
        self.data.earn(n)
        self.control.earn(1)
