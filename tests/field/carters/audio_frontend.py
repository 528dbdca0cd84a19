"""Log-mel front end for the speech tower: fixed-size frame buffers lent from a ring."""
from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Optional


class FrameBuffer:
    __slots__ = ("samples", "length", "seq")

    def __init__(self, capacity: int) -> None:
        self.samples = [0.0] * capacity
        self.length = 0
        self.seq = -1

    def fill(self, chunk: list[float], seq: int) -> None:
        self.length = min(len(chunk), len(self.samples))
        self.samples[: self.length] = chunk[: self.length]
        self.seq = seq

    def rms(self) -> float:
        if not self.length:
            return 0.0
        return math.sqrt(sum(s * s for s in self.samples[: self.length]) / self.length)


class RingExhausted(RuntimeError):
    pass


class BufferRing:
    def __init__(self, count: int, capacity: int) -> None:
        self.capacity = capacity
        self._spare = [FrameBuffer(capacity) for _ in range(count)]
        self.lent = 0

    def borrow(self) -> FrameBuffer:
        if not self._spare:
            raise RingExhausted(f"{self.lent} buffers out")
        self.lent += 1
        return self._spare.pop()

    def give_back(self, buf: FrameBuffer) -> None:
        self.lent -= 1
        buf.length = 0
        self._spare.append(buf)

    @contextmanager
    def lending(self) -> Iterator[FrameBuffer]:
        buf = self.borrow()  # clean: finally of the context manager gives back
        try:
            yield buf
        finally:
            self.give_back(buf)

    @contextmanager
    def window(self, chunk: list[float]) -> Iterator[Optional[FrameBuffer]]:
        buf = self.borrow()  # leak: the too-short window yields None and returns past give_back
        buf.fill(chunk, 0)
        if buf.length < 4:
            yield None
            return
        try:
            yield buf
        finally:
            self.give_back(buf)


def chunked(samples: list[float], n: int) -> Iterator[list[float]]:
    for i in range(0, len(samples), n):
        yield samples[i : i + n]


class SpeechFrontend:
    def __init__(self, ring: BufferRing, threshold: float = 0.01) -> None:
        self.ring = ring
        self.threshold = threshold
        self.skipped = 0

    def frames(self, samples: list[float]) -> Iterator[FrameBuffer]:
        """Each yielded buffer belongs to the consumer."""
        for seq, chunk in enumerate(chunked(samples, self.ring.capacity)):
            buf = self.ring.borrow()  # clean: yielded to the consumer who owns it
            buf.fill(chunk, seq)
            yield buf

    def scan(self, samples: list[float]) -> Iterator[FrameBuffer]:
        """Each yielded buffer is valid until the next step."""
        for seq, chunk in enumerate(chunked(samples, self.ring.capacity)):
            buf = self.ring.borrow()  # clean: near miss, given back when the generator resumes or is closed
            try:
                buf.fill(chunk, seq)
                yield buf
            finally:
                self.ring.give_back(buf)

    def voiced_levels(self, samples: list[float]) -> list[float]:
        levels: list[float] = []
        for buf in self.frames(samples):  # leak: silent frames continue without give_back
            level = buf.rms()
            if level < self.threshold:
                self.skipped += 1
                continue
            levels.append(level)
            self.ring.give_back(buf)
        return levels

    def peak(self, samples: list[float]) -> float:
        top = 0.0
        for buf in self.frames(samples):  # clean: given back on every pass
            top = max(top, buf.rms())
            self.ring.give_back(buf)
        return top

    def first_voiced(self, samples: list[float]) -> int:
        for buf in self.frames(samples):  # clean: near miss, given back before the return is decided
            level, seq = buf.rms(), buf.seq
            self.ring.give_back(buf)
            if level >= self.threshold:
                return seq
        return -1

    def last_frame_level(self, samples: list[float]) -> float:
        last = None
        for buf in self.frames(samples):  # leak: every frame but the last is rebound away
            last = buf
        if last is None:
            return 0.0
        level = last.rms()
        self.ring.give_back(last)
        return level

    def levels_of_scan(self, samples: list[float]) -> list[float]:
        return [buf.rms() for buf in self.scan(samples)]  # clean: near miss, the scanning generator gives back itself

    def take_window(self, samples: list[float], start: int) -> Optional[FrameBuffer]:
        if start >= len(samples):
            return None
        buf = self.ring.borrow()  # clean: returned to the caller
        buf.fill(samples[start : start + self.ring.capacity], start)
        return buf

    def spectrum(self, samples: list[float], bins: int) -> list[float]:
        buf = self.take_window(samples, 0)  # leak: only the numbers are copied out
        if buf is None:
            return [0.0] * bins
        x = buf.samples[: buf.length]
        return [abs(sum(v * math.cos(2 * math.pi * k * i / len(x)) for i, v in enumerate(x))) for k in range(bins)]

    def zero_crossings(self, samples: list[float]) -> int:
        buf = self.take_window(samples, 0)  # clean: given back after the count
        if buf is None:
            return 0
        x = buf.samples[: buf.length]
        count = sum(1 for a, b in zip(x, x[1:]) if (a < 0) != (b < 0))
        self.ring.give_back(buf)
        return count

    def rms_in_context(self, samples: list[float]) -> float:
        with self.ring.lending() as buf:  # clean: leaves through the with
            buf.fill(samples, 0)
            if buf.length == 0:
                return 0.0
            return buf.rms()


class OverlapAdder:
    """Needs the previous and the present frame at the same time."""

    def __init__(self, ring: BufferRing) -> None:
        self.ring = ring
        self.prev: Optional[FrameBuffer] = None

    def push(self, chunk: list[float], seq: int) -> float:
        cur = self.ring.borrow()  # clean: near miss, becomes prev and is given back one push later or in close
        cur.fill(chunk, seq)
        mixed = cur.rms()
        if self.prev is not None:
            mixed = 0.5 * (mixed + self.prev.rms())
            self.ring.give_back(self.prev)
        self.prev = cur
        return mixed

    def close(self) -> None:
        if self.prev is not None:
            self.ring.give_back(self.prev)
            self.prev = None


def denoise(ring: BufferRing, samples: list[float], model: Callable[[list[float]], list[float]]) -> list[float]:
    try:
        buf = ring.borrow()  # leak: a ValueError of the model is survived and skips give_back
        buf.fill(samples, 0)
        out = model(buf.samples[: buf.length])
        ring.give_back(buf)
    except RingExhausted:
        return samples
    except ValueError:
        return samples
    return out


def mix_tracks(ring: BufferRing, tracks: Iterable[list[float]]) -> list[float]:
    acc = ring.borrow()  # clean: given back once the mix is copied out
    for i, track in enumerate(tracks):
        for j, s in enumerate(track[: ring.capacity]):
            acc.samples[j] = s if i == 0 else acc.samples[j] + s
        acc.length = max(acc.length, min(len(track), ring.capacity))
    mixed = acc.samples[: acc.length]
    ring.give_back(acc)
    return mixed


def main() -> None:
    ring = BufferRing(4, 8)
    front = SpeechFrontend(ring)
    wave = [math.sin(i) for i in range(20)]
    print(front.peak(wave), front.first_voiced(wave), len(front.levels_of_scan(wave)))
    adder = OverlapAdder(ring)
    for seq, chunk in enumerate(chunked(wave, 8)):
        adder.push(chunk, seq)
    adder.close()
    mix_tracks(ring, [wave, wave])
    front.rms_in_context(wave)
    print("lent", ring.lent)


if __name__ == "__main__":
    main()
