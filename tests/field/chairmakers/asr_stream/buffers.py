"""Memory of the streaming recogniser: audio frames, encoder states, feature windows."""
from __future__ import annotations

import collections
import threading

import numpy as np


class Starved(Exception):
    """A pool is empty."""


class Frame:
    __slots__ = ("pcm", "used", "stamp")

    def __init__(self, samples: int) -> None:
        self.pcm = np.zeros(samples, np.int16)
        self.used = 0
        self.stamp = 0.0

    def fill(self, data: np.ndarray) -> int:
        n = min(len(data), len(self.pcm) - self.used)
        self.pcm[self.used:self.used + n] = data[:n]
        self.used += n
        return n


class FramePool:
    def __init__(self, count: int, samples: int) -> None:
        self._frames = collections.deque(Frame(samples) for _ in range(count))
        self._mutex = threading.Lock()

    def checkout(self) -> Frame:
        with self._mutex:
            if not self._frames:
                raise Starved("frames")
            frame = self._frames.pop()  # clean: handed to the caller
        frame.used = 0
        return frame

    def checkin(self, frame: Frame) -> None:
        with self._mutex:
            self._frames.append(frame)


class StateBank:
    """Recurrent state of the encoder, one index per live session."""

    def __init__(self, count: int, dim: int) -> None:
        self.data = np.zeros((count, dim), np.float32)
        self._open = collections.deque(range(count))
        self._poisoned: set[int] = set()
        self._mutex = threading.Lock()

    def claim(self) -> int | None:
        with self._mutex:
            while self._open:
                index = self._open.popleft()  # leak: a poisoned index is passed over, and heal() does not bring it into the queue again
                if index in self._poisoned:
                    continue
                self.data[index] = 0.0
                return index
        return None

    def poison(self, index: int) -> None:
        """The state went non-finite; it is not to be used before heal()."""
        self._poisoned.add(index)

    def heal(self) -> None:
        with self._mutex:
            for index in self._poisoned:
                self.data[index] = 0.0
            self._poisoned.clear()

    def unclaim(self, index: int) -> None:
        with self._mutex:
            self._open.append(index)


class Windows:
    """Feature scratch for one encoder batch, as a loan with an explicit end."""

    def __init__(self, count: int, batch: int, frames: int, mels: int) -> None:
        self._stack = [np.empty((batch, frames, mels), np.float32) for _ in range(count)]
        self._cv = threading.Condition()

    def loan(self, timeout: float | None = None) -> np.ndarray | None:
        with self._cv:
            if not self._cv.wait_for(lambda: bool(self._stack), timeout):
                return None
            return self._stack.pop()  # clean: handed to the caller

    def repay(self, window: np.ndarray) -> None:
        with self._cv:
            self._stack.append(window)
            self._cv.notify()
