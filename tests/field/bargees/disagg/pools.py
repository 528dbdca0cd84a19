"""Slot numbers of a KV cache and registered memory windows for the transport."""
from __future__ import annotations

from dataclasses import dataclass


class SlotPool:
    def __init__(self, count: int) -> None:
        self._unused = set(range(count))

    def borrow(self) -> int | None:
        return self._unused.pop() if self._unused else None

    def restore(self, slot: int) -> None:
        self._unused.add(slot)

    def headroom(self) -> int:
        return len(self._unused)


@dataclass
class Window:
    key: int
    nbytes: int
    valid: bool = True


class WindowRegistry:
    def __init__(self) -> None:
        self._live: dict[int, Window] = {}
        self._key = 0

    def register(self, nbytes: int) -> Window:
        self._key += 1
        window = Window(self._key, nbytes)
        self._live[window.key] = window
        return window

    def deregister(self, window: Window) -> None:
        window.valid = False
        del self._live[window.key]
