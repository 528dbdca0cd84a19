"""One speaker on one connection."""
from __future__ import annotations

import time
from collections import deque

import numpy as np

from .buffers import Frame, FramePool, StateBank

SILENCE = 40


class UnsupportedRate(ValueError):
    pass


class Session:
    """Cuts the incoming audio into frames, which wait in `ready` for the runner."""

    def __init__(self, sid: str, frames: FramePool, bank: StateBank, state: int, rate: int) -> None:
        if rate not in (8000, 16000, 48000):
            raise UnsupportedRate(rate)
        self.sid, self.rate = sid, rate
        self.frames, self.bank, self.state = frames, bank, state
        self.ready: deque[Frame] = deque()
        self._partial: Frame | None = None
        self.text: list[str] = []
        self.closed = False

    def feed(self, pcm: np.ndarray) -> None:
        if self.closed:
            return
        at = 0
        while at < len(pcm):
            if self._partial is None:
                self._partial = self.frames.checkout()  # clean: near miss, either it moves to ready, or flush() and close() find it
                self._partial.stamp = time.monotonic()
            at += self._partial.fill(pcm[at:])
            if self._partial.used == len(self._partial.pcm):
                self.ready.append(self._partial)
                self._partial = None

    def feed_tone(self, level: int, millis: int) -> bool:
        """Comfort noise of the gateway; below the silence threshold it is not worth a frame."""
        frame = self.frames.checkout()  # leak: silence returns False before the frame is queued
        if level < SILENCE:
            return False
        frame.fill(np.full(self.rate * millis // 1000, level, np.int16))
        self.ready.append(frame)
        return True

    def flush(self) -> None:
        if self._partial is not None and self._partial.used:
            self.ready.append(self._partial)
            self._partial = None

    def take_ready(self) -> Frame | None:
        return self.ready.popleft() if self.ready else None

    def restart(self) -> bool:
        """Forget the context, keep the connection."""
        if self.closed:
            return False
        fresh = self.bank.claim()  # clean: near miss, it becomes the session's state once the older one is given back
        if fresh is None:
            return False
        self.bank.unclaim(self.state)
        self.state = fresh
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        while self.ready:
            self.frames.checkin(self.ready.popleft())
        if self._partial is not None:
            self.frames.checkin(self._partial)
            self._partial = None
        self.bank.unclaim(self.state)
