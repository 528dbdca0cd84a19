"""Decode / scale / encode pipeline that lends frame buffers from a fixed arena."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Callable, Iterator


@dataclass(eq=False)
class Frame:
    data: bytearray
    pts: int = 0
    keyframe: bool = False


class FramePool:
    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._spare = [Frame(bytearray(size)) for _ in range(count)]

    def borrow(self) -> Frame | None:
        with self._lock:
            if not self._spare:
                return None
            frame = self._spare.pop()  # clean: handed to the caller
        return frame

    def borrow_pair(self) -> tuple[Frame, Frame] | None:
        with self._lock:
            if len(self._spare) < 2:
                return None
            first = self._spare.pop()  # clean: near miss, the length was checked for both under the lock
            second = self._spare.pop()  # clean: handed to the caller as half of the pair
        return first, second

    def recycle(self, frame: Frame) -> None:
        if len(frame.data) != self._size:
            frame.data = bytearray(self._size)
        with self._lock:
            self._spare.append(frame)


class Decoder:
    def __init__(self, pool: FramePool, out: "queue.Queue[Frame | None]") -> None:
        self._pool = pool
        self._out = out
        self._skip_until_key = True

    def feed(self, packet: bytes, pts: int) -> bool:
        frame = self._pool.borrow()  # leak: while seeking a key frame the borrowed frame is dropped
        if frame is None:
            return False
        frame.pts = pts
        frame.keyframe = packet[:1] == b"K"
        if self._skip_until_key and not frame.keyframe:
            return True
        self._skip_until_key = False
        frame.data[: len(packet)] = packet
        self._out.put(frame)
        return True

    def feed_nowait(self, packet: bytes, pts: int) -> bool:
        frame = self._pool.borrow()  # clean: near miss, a full queue sends the frame back to the pool
        if frame is None:
            return False
        frame.pts = pts
        frame.data[: len(packet)] = packet
        try:
            self._out.put_nowait(frame)
        except queue.Full:
            self._pool.recycle(frame)
            return False
        return True


class Scaler:
    def __init__(self, pool: FramePool, src: queue.Queue, dst: queue.Queue) -> None:
        self._pool = pool
        self._src = src
        self._dst = dst

    def run(self) -> None:
        while True:
            frame = self._src.get()
            if frame is None:
                self._dst.put(None)
                return
            scaled = self._pool.borrow()  # clean: put on the next queue, whose sink recycles
            if scaled is None:
                self._pool.recycle(frame)
                continue
            scaled.pts = frame.pts
            scaled.data[::2] = frame.data[::2]
            self._pool.recycle(frame)
            self._dst.put(scaled)

    def blend(self, frame: Frame) -> bytes | None:
        pair = self._pool.borrow_pair()  # leak: only the first of the two frames is recycled
        if pair is None:
            return None
        low, high = pair
        low.data[:] = frame.data
        high.data[:] = frame.data[::-1]
        mixed = bytes((a + b) // 2 for a, b in zip(low.data, high.data))
        self._pool.recycle(low)
        return mixed

    def difference(self, frame: Frame) -> int | None:
        pair = self._pool.borrow_pair()  # clean: near miss, the loop over the pair recycles both
        if pair is None:
            return None
        before, after = pair
        before.data[:] = frame.data
        changed = sum(1 for a, b in zip(before.data, after.data) if a != b)
        for item in pair:
            self._pool.recycle(item)
        return changed


class Encoder:
    """Keeps one reference frame between calls."""

    def __init__(self, pool: FramePool, sink: Callable[[bytes], bool]) -> None:
        self._pool = pool
        self._sink = sink
        self._reference: Frame | None = None
        self._overlay: Frame | None = None

    def keep_reference(self, frame: Frame) -> None:
        copy = self._pool.borrow()  # clean: near miss, the former reference is recycled before the field is set
        if copy is None:
            return
        copy.data[:] = frame.data
        if self._reference is not None:
            self._pool.recycle(self._reference)
        self._reference = copy

    def set_overlay(self, pixels: bytes) -> bool:
        overlay = self._pool.borrow()  # leak: setting a new overlay loses the one in the field
        if overlay is None:
            return False
        overlay.data[: len(pixels)] = pixels
        self._overlay = overlay
        return True

    def drain(self, src: queue.Queue) -> Iterator[int]:
        while (frame := src.get()) is not None:
            ok = self._sink(bytes(frame.data))
            pts = frame.pts
            self._pool.recycle(frame)
            if ok:
                yield pts

    def thumbnail(self, packet: bytes) -> bytes:
        frame = self._pool.borrow()  # leak: a copy of the bytes is returned and the frame is forgotten
        if frame is None:
            return b""
        frame.data[: len(packet)] = packet
        return bytes(frame.data[:64])

    def close(self) -> None:
        for held in (self._reference, self._overlay):
            if held is not None:
                self._pool.recycle(held)
        self._reference = self._overlay = None
