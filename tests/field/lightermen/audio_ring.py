"""Audio capture ring: spans are reserved by the capture thread, read by feature workers."""
from __future__ import annotations

import array
import queue
import threading
import time
from dataclasses import dataclass
from collections import deque
from typing import Deque, List, Optional, Protocol


@dataclass
class Span:
    start: int
    frames: int
    view: memoryview
    stamp: float = 0.0
    voiced: bool = False


class SampleSource(Protocol):
    def read_into(self, view: memoryview) -> int: ...


class AudioRing:
    """Fixed slices of one sample array.

    reserve() gives a span to fill. It ends with commit(), which queues it for reading, or discard().
    acquire_read() gives the oldest committed span. It ends with finish_read().
    """

    def __init__(self, slices: int, frames: int) -> None:
        self._samples = array.array("h", bytes(2 * slices * frames))
        self._frames = frames
        self._vacant: List[int] = list(range(slices))
        self._lock = threading.Lock()
        self._ready: "queue.Queue[Span]" = queue.Queue()

    def reserve(self) -> Optional[Span]:
        with self._lock:
            if not self._vacant:
                return None
            start = self._vacant.pop() * self._frames
        view = memoryview(self._samples)[start : start + self._frames]
        return Span(start, self._frames, view)

    def commit(self, span: Span) -> None:
        span.stamp = time.monotonic()
        self._ready.put(span)

    def discard(self, span: Span) -> None:
        with self._lock:
            self._vacant.append(span.start // self._frames)

    def acquire_read(self, timeout: float = 0.1) -> Optional[Span]:
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            return None

    finish_read = discard


def energy(span: Span) -> float:
    total = 0
    for s in span.view[: span.frames]:
        total += s * s
    return total / max(span.frames, 1)


class CaptureThread(threading.Thread):
    def __init__(self, ring: AudioRing, source: SampleSource) -> None:
        super().__init__(daemon=True, name="capture")
        self.ring = ring
        self.source = source
        self.overruns = 0
        self._stop_flag = threading.Event()

    def run(self) -> None:
        while not self._stop_flag.is_set():
            span = self.ring.reserve()  # clean: committed when filled, else discarded
            if span is None:
                self.overruns += 1
                time.sleep(0.005)
                continue
            got = self.source.read_into(span.view)
            if got <= 0:
                self.ring.discard(span)
                break
            span.frames = got
            self.ring.commit(span)

    def shutdown(self) -> None:
        self._stop_flag.set()
        self.join()


class GatedCaptureThread(CaptureThread):
    """Commits only what is louder than the gate, with some hang-over."""

    gate = 400.0
    hang = 5

    def run(self) -> None:
        quiet = 0
        while not self._stop_flag.is_set():
            span = self.ring.reserve()  # leak: spans below the gate are neither committed nor discarded
            if span is None:
                self.overruns += 1
                time.sleep(0.005)
                continue
            got = self.source.read_into(span.view)
            if got <= 0:
                self.ring.discard(span)
                break
            span.frames = got
            if energy(span) < self.gate:
                quiet += 1
            else:
                quiet = 0
            if quiet <= self.hang:
                span.voiced = quiet == 0
                self.ring.commit(span)


def capture_prompt(ring: AudioRing, source: SampleSource, slices: int) -> int:
    """Records a short prompt tone and commits it as a whole or not at all."""
    spans: List[Span] = []
    for _ in range(slices):
        span = ring.reserve()  # clean: near miss, in `spans`, discarded together or committed together
        if span is None:
            break
        spans.append(span)
        span.frames = source.read_into(span.view)
    if len(spans) < slices:
        for span in spans:
            ring.discard(span)
        return 0
    for span in spans:
        ring.commit(span)
    return len(spans)


def level_meter(ring: AudioRing, source: SampleSource) -> Optional[float]:
    span = ring.reserve()  # leak: the silent way returns without discard
    if span is None:
        return None
    span.frames = source.read_into(span.view)
    if span.frames == 0:
        return 0.0
    level = energy(span)
    ring.discard(span)
    return level


class VoiceActivity:
    """Joins voiced spans into utterances."""

    def __init__(self, ring: AudioRing, threshold: float) -> None:
        self.ring = ring
        self.threshold = threshold
        self._utterance: List[Span] = []
        self._preroll: Optional[Span] = None

    def feed(self) -> Optional[bytes]:
        span = self.ring.acquire_read()  # clean: near miss, kept in the utterance or the preroll slot
        if span is None:
            return None
        if energy(span) >= self.threshold:
            if self._preroll is not None:
                self._utterance.append(self._preroll)
                self._preroll = None
            self._utterance.append(span)
            return None
        if self._preroll is not None:
            self.ring.finish_read(self._preroll)
        self._preroll = span
        return self._flush() if self._utterance else None

    def _flush(self) -> bytes:
        out = bytearray()
        for span in self._utterance:
            out += span.view[: span.frames].tobytes()
            self.ring.finish_read(span)
        self._utterance.clear()
        return bytes(out)

    def close(self) -> None:
        if self._preroll is not None:
            self.ring.finish_read(self._preroll)
            self._preroll = None
        for span in self._utterance:
            self.ring.finish_read(span)
        self._utterance.clear()


class BargeInDetector:
    """Looks whether somebody talks over the synthesised answer."""

    def __init__(self, ring: AudioRing) -> None:
        self.ring = ring
        self.window: Deque[Span] = deque(maxlen=4)

    def step(self, playing: bool) -> bool:
        span = self.ring.acquire_read()  # leak: falls out of the bounded window or is cleared, never finished
        if span is None:
            return False
        self.window.append(span)
        loud = sum(1 for s in self.window if energy(s) > 900.0)
        return playing and loud >= 3

    def reset(self) -> None:
        self.window.clear()


def transcribe_loop(ring: AudioRing, model, stop: threading.Event, text_out: "queue.Queue[str]") -> None:
    while not stop.is_set():
        span = ring.acquire_read()  # clean: finish_read in every turn
        if span is None:
            continue
        text = model.transcribe(span.view[: span.frames])
        ring.finish_read(span)
        if text:
            text_out.put(text)


def wake_word(ring: AudioRing, model, limit: int) -> bool:
    """True as soon as the wake word was heard."""
    for _ in range(limit):
        span = ring.acquire_read()  # leak: returning True on a hit skips finish_read
        if span is None:
            continue
        score = model.score(span.view[: span.frames])
        if score > 0.8:
            return True
        ring.finish_read(span)
    return False


def skip_stale(ring: AudioRing, max_age: float) -> Optional[Span]:
    """The first span that is fresh enough; the caller finishes it."""
    while True:
        span = ring.acquire_read(0)  # clean: stale ones are finished, the fresh one is the caller's
        if span is None:
            return None
        if time.monotonic() - span.stamp <= max_age:
            return span
        ring.finish_read(span)


def current_level(ring: AudioRing) -> float:
    span = skip_stale(ring, 0.25)  # leak: measured and dropped
    if span is None:
        return 0.0
    return energy(span) ** 0.5


def current_peak(ring: AudioRing) -> int:
    span = skip_stale(ring, 0.25)  # clean: near miss, the return goes through the finally
    if span is not None:
        try:
            return max(abs(s) for s in span.view[: span.frames])
        finally:
            ring.finish_read(span)
    return 0
