from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Iterator


class TicketBooth:
    def __init__(self, limit: int):
        self._cv = threading.Condition()
        self._left = limit

    def draw(self) -> int:
        with self._cv:
            while self._left == 0:
                self._cv.wait()
            self._left -= 1
            return self._left

    def hand_back(self) -> None:
        with self._cv:
            self._left += 1
            self._cv.notify()

    @contextmanager
    def ticket(self) -> Iterator[None]:
        self.draw()  # clean: handed back in the finally
        try:
            yield
        finally:
            self.hand_back()
