"""Incremental detokenizer states and bounded output channels."""
from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Optional


class StreamState:
    __slots__ = ("ids", "text", "offset", "_pool")

    def __init__(self, pool: "StatePool") -> None:
        self._pool = pool
        self.reset()

    def reset(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.offset = 0

    def feed(self, token: int) -> str:
        self.ids.append(token)
        piece = chr(97 + token % 26)
        self.text += piece
        return piece

    def dispose(self) -> None:
        self._pool.restore(self)


class StatePool:
    def __init__(self, size: int) -> None:
        self._spare = deque(StreamState(self) for _ in range(size))
        self._lock = threading.Lock()

    def obtain(self) -> Optional[StreamState]:
        with self._lock:
            return self._spare.pop() if self._spare else None

    def restore(self, state: StreamState) -> None:
        state.reset()
        with self._lock:
            self._spare.append(state)

    def obtain_primed(self, prompt: list[int], limit: int) -> Optional[StreamState]:
        state = self.obtain()  # leak: a prompt over the limit gives None and the state is gone
        if state is None:
            return None
        if len(prompt) > limit:
            return None
        for token in prompt:
            state.feed(token)
        state.offset = len(state.text)
        return state


class Channel(ABC):
    """Bounded by credits that the writer takes and the reader returns."""

    @abstractmethod
    def emit(self, text: str) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...


class CreditChannel(Channel):
    def __init__(self, credits: threading.Semaphore) -> None:
        self.credits = credits
        self.pieces: deque[str] = deque()
        self.closed = False

    def emit(self, text: str) -> bool:
        if not self.credits.acquire(timeout=0.1):  # clean: near miss, read or close releases one for each piece
            return False
        self.pieces.append(text)
        return True

    def read(self) -> Optional[str]:
        if not self.pieces:
            return None
        piece = self.pieces.popleft()
        self.credits.release()
        return piece

    def close(self) -> None:
        self.closed = True
        while self.pieces:
            self.read()


class CoalescingChannel(Channel):
    """Joins small pieces; the whole goes out with one read."""

    def __init__(self, credits: threading.Semaphore) -> None:
        self.credits = credits
        self.joined = ""

    def emit(self, text: str) -> bool:
        if not self.credits.acquire(blocking=False):  # leak: one credit for each piece, one release for the joined text
            return False
        self.joined += text
        return True

    def read(self) -> Optional[str]:
        if not self.joined:
            return None
        out, self.joined = self.joined, ""
        self.credits.release()
        return out

    def close(self) -> None:
        if self.joined:
            self.read()
