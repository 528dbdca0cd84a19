"""Streaming audio input: sample windows from a ring, feature extraction with retry, result callbacks."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

logger = logging.getLogger(__name__)


class Glitch(Exception):
    """A window with clipped or missing samples."""


class Window:
    __slots__ = ("idx", "samples", "filled")

    def __init__(self, idx: int, size: int) -> None:
        self.idx = idx
        self.samples = np.zeros(size, dtype=np.float32)
        self.filled = 0


class WindowBank:
    def __init__(self, count: int, size: int) -> None:
        self._bank: "queue.LifoQueue[Window]" = queue.LifoQueue()
        for i in range(count):
            self._bank.put(Window(i, size))
        self.size = size
        self._gate = threading.Lock()

    def draw(self) -> Optional[Window]:
        try:
            return self._bank.get_nowait()
        except queue.Empty:
            return None

    def draw_pair(self) -> Optional[Tuple[Window, Window]]:
        """Left and right channel."""
        self._gate.acquire()  # clean: near miss, the finally covers each return
        try:
            left = self.draw()  # clean: near miss, restored when there is no right one
            if left is None:
                return None
            right = self.draw()  # clean: returned with left
            if right is None:
                self.restore(left)
                return None
            return left, right
        finally:
            self._gate.release()

    def restore(self, w: Window) -> None:
        w.filled = 0
        self._bank.put(w)

    def available(self) -> int:
        return self._bank.qsize()


Features = np.ndarray
Callback = Callable[[Window, Features], None]


class Extractor:
    def __init__(self, bank: WindowBank, fft: Callable[[np.ndarray], Features]) -> None:
        self.bank = bank
        self.fft = fft
        self.emitted: Dict[str, Window] = {}

    def fill(self, pcm: Sequence[float]) -> Optional[Window]:
        w = self.bank.draw()  # clean: returned to the caller
        if w is None:
            return None
        w.filled = min(len(pcm), self.bank.size)
        w.samples[: w.filled] = pcm[: w.filled]
        return w

    def fill_with_retry(self, source: Callable[[], Sequence[float]], tries: int = 3) -> Optional[Window]:
        """A source may hiccup; each try reads afresh."""
        for _ in range(tries):
            w = self.bank.draw()  # leak: a glitch starts the next try without restoring the window
            if w is None:
                return None
            try:
                pcm = source()
            except Glitch as g:
                logger.debug("glitch: %s", g)
                continue
            w.filled = len(pcm)
            w.samples[: w.filled] = pcm
            return w
        return None

    def extract(self, pcm: Sequence[float], keep: bool, key: str = "") -> Optional[Features]:
        """With `keep` the window stays in `emitted` for realignment, until forget()."""
        w = self.fill(pcm)  # clean: near miss, restored unless kept in emitted
        if w is None:
            return None
        feats = self.fft(w.samples[: w.filled])
        if keep:
            self.forget(key)
            self.emitted[key] = w
        else:
            self.bank.restore(w)
        return feats

    def forget(self, key: str) -> None:
        w = self.emitted.pop(key, None)
        if w is not None:
            self.bank.restore(w)

    def extract_async(self, pcm: Sequence[float], on_features: Callback) -> bool:
        """The callback owns the window and restores it."""
        w = self.fill(pcm)  # leak: a silent window is not passed to the callback
        if w is None:
            return False
        if not np.abs(w.samples[: w.filled]).max(initial=0.0) > 1e-4:
            return False
        on_features(w, self.fft(w.samples[: w.filled]))
        return True

    def extract_owned(self, pcm: Sequence[float], window: Optional[Window] = None) -> Features:
        """Into the caller's window, or one of our own."""
        owned = window is None
        w = self.fill(pcm) if owned else window  # clean: near miss, restored under the same flag
        if w is None:
            return self.fft(np.asarray(pcm, dtype=np.float32))
        try:
            return self.fft(w.samples[: w.filled])
        finally:
            if owned:
                self.bank.restore(w)

    def stereo(self, left: Sequence[float], right: Sequence[float]) -> Optional[Features]:
        pair = self.bank.draw_pair()  # leak: channels of different lengths return with both windows drawn
        if pair is None:
            return None
        if len(left) != len(right):
            logger.warning("channels differ: %d, %d", len(left), len(right))
            return None
        l, r = pair
        l.samples[: len(left)] = left
        r.samples[: len(right)] = right
        out = self.fft((l.samples + r.samples) / 2)
        for w in pair:
            self.bank.restore(w)
        return out


def energy(ex: Extractor, pcm: Sequence[float]) -> float:
    total: List[float] = []

    def on_features(w: Window, feats: Features) -> None:
        total.append(float((w.samples[: w.filled] ** 2).sum()))
        ex.bank.restore(w)

    ex.extract_async(pcm, on_features)
    return sum(total)


def calibrate(ex: Extractor, source: Callable[[], Sequence[float]]) -> Optional[float]:
    w = ex.fill_with_retry(source)  # clean: restored once the level is known
    if w is None:
        return None
    level = float(np.abs(w.samples[: w.filled]).mean()) if w.filled else 0.0
    ex.bank.restore(w)
    return level
