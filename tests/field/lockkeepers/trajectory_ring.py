"""Shared-memory ring between the simulators and the learner: reserve, write, commit; peek, read, retire."""
from __future__ import annotations

import struct
import threading
import time
from typing import Iterable, Iterator, List, Optional

HEADER = struct.Struct("<QII")


class Frame:
    __slots__ = ("offset", "size", "state", "stamp")

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.state = "reserved"
        self.stamp = 0


class TrajectoryRing:
    """A reserved frame waits for commit() or abandon(), a peeked one for retire()."""

    def __init__(self, nbytes: int) -> None:
        self.mem = bytearray(nbytes)
        self._reserved: List[Frame] = []
        self._ready: List[Frame] = []
        self._reading: List[Frame] = []
        self._used = 0
        self._head = 0
        self._cv = threading.Condition()

    def reserve(self, size: int) -> Optional[Frame]:
        with self._cv:
            if self._used + size > len(self.mem):
                return None
            frame = Frame(self._head, size)
            self._head = (self._head + size) % len(self.mem)
            self._used += size
            self._reserved.append(frame)
            return frame

    def commit(self, frame: Frame) -> None:
        with self._cv:
            self._reserved.remove(frame)
            frame.state = "ready"
            self._ready.append(frame)
            self._cv.notify()

    def abandon(self, frame: Frame) -> None:
        with self._cv:
            self._reserved.remove(frame)
            self._used -= frame.size
            frame.state = "free"

    def peek(self, timeout: float) -> Optional[Frame]:
        with self._cv:
            if not self._ready:
                self._cv.wait(timeout)
            if not self._ready:
                return None
            frame = self._ready.pop(0)
            frame.state = "reading"
            self._reading.append(frame)
            return frame

    def retire(self, frame: Frame) -> None:
        with self._cv:
            self._reading.remove(frame)
            self._used -= frame.size
            frame.state = "free"


def write_trajectory(ring: TrajectoryRing, actor: int, payload: bytes) -> bool:
    size = HEADER.size + len(payload)
    frame = ring.reserve(size)  # clean: committed when there is one
    if frame is None:
        return False
    HEADER.pack_into(ring.mem, frame.offset, time.monotonic_ns(), actor, len(payload))
    start = frame.offset + HEADER.size
    ring.mem[start : start + len(payload)] = payload
    ring.commit(frame)
    return True


def write_checked(ring: TrajectoryRing, actor: int, payload: bytes, limit: int) -> str:
    frame = ring.reserve(HEADER.size + len(payload))  # clean: near miss, abandoned when too long
    if frame is None:
        return "full"
    if len(payload) > limit:
        ring.abandon(frame)
        return "long"
    HEADER.pack_into(ring.mem, frame.offset, 0, actor, len(payload))
    start = frame.offset + HEADER.size
    ring.mem[start : start + len(payload)] = payload
    ring.commit(frame)
    return "ok"


def reserve_patiently(ring: TrajectoryRing, size: int, tries: int) -> Optional[Frame]:
    """The frame is the caller's to commit or abandon."""
    delay = 0.001
    for _ in range(tries):
        frame = ring.reserve(size)  # clean: handed to the caller
        if frame is not None:
            frame.stamp = time.monotonic_ns()
            return frame
        time.sleep(delay)
        delay = min(0.1, delay * 2)
    return None


def write_many(ring: TrajectoryRing, actor: int, payloads: Iterable[bytes]) -> int:
    written = 0
    for payload in payloads:
        frame = reserve_patiently(ring, HEADER.size + len(payload), 5)  # clean: committed, None ends the loop
        if frame is None:
            break
        HEADER.pack_into(ring.mem, frame.offset, frame.stamp, actor, len(payload))
        ring.commit(frame)
        written += 1
    return written


def has_room(ring: TrajectoryRing, size: int) -> bool:
    if reserve_patiently(ring, size, 3) is None:  # leak: the frame of the test is thrown away
        return False
    return True


def write_split(ring: TrajectoryRing, actor: int, payload: bytes) -> bool:
    half = len(payload) // 2
    first = ring.reserve(HEADER.size + half)  # leak: no abandon when the second half finds no room
    if first is None:
        return False
    second = ring.reserve(HEADER.size + len(payload) - half)  # clean: committed when there is one
    if second is None:
        return False
    HEADER.pack_into(ring.mem, first.offset, 1, actor, half)
    HEADER.pack_into(ring.mem, second.offset, 2, actor, len(payload) - half)
    ring.commit(first)
    ring.commit(second)
    return True


def read_from(ring: TrajectoryRing, actor: int, limit: int) -> List[bytes]:
    out: List[bytes] = []
    while len(out) < limit:
        frame = ring.peek(0.1)  # leak: the frame of another actor is skipped without retire
        if frame is None:
            break
        _, owner, length = HEADER.unpack_from(ring.mem, frame.offset)
        if owner != actor:
            continue
        start = frame.offset + HEADER.size
        out.append(bytes(ring.mem[start : start + length]))
        ring.retire(frame)
    return out


def discard_older(ring: TrajectoryRing, stamp: int) -> int:
    dropped = 0
    while True:
        frame = ring.peek(0.0)  # clean: near miss, the break of the young one retires first
        if frame is None:
            break
        written, _, _ = HEADER.unpack_from(ring.mem, frame.offset)
        ring.retire(frame)
        if written >= stamp:
            break
        dropped += 1
    return dropped


class FrameWriter:
    """with FrameWriter(ring, n) as w: w.put(...). Commits when something was written, abandons otherwise."""

    def __init__(self, ring: TrajectoryRing, size: int) -> None:
        self.ring, self.size = ring, size
        self.frame: Optional[Frame] = None
        self.filled = 0

    def __enter__(self) -> "FrameWriter":
        self.frame = self.ring.reserve(self.size)  # clean: near miss, __exit__ commits or abandons
        return self

    def put(self, chunk: bytes) -> int:
        if self.frame is None:
            return 0
        at = self.frame.offset + self.filled
        self.ring.mem[at : at + len(chunk)] = chunk
        self.filled += len(chunk)
        return len(chunk)

    def __exit__(self, kind, exc, tb) -> None:
        if self.frame is None:
            return
        if kind is None and self.filled:
            self.ring.commit(self.frame)
        else:
            self.ring.abandon(self.frame)
        self.frame = None


class EagerWriter:
    """As FrameWriter, and the caller may look at `filled` afterwards."""

    def __init__(self, ring: TrajectoryRing, size: int) -> None:
        self.ring = ring
        self.filled = 0
        self.frame = ring.reserve(size)  # leak: __exit__ does nothing for an unfilled frame

    def __enter__(self) -> "EagerWriter":
        return self

    def put(self, chunk: bytes) -> None:
        if self.frame is not None:
            self.ring.mem[self.frame.offset : self.frame.offset + len(chunk)] = chunk
            self.filled += len(chunk)

    def __exit__(self, kind, exc, tb) -> bool:
        if self.frame is not None and self.filled:
            self.ring.commit(self.frame)
        return False


def stream(ring: TrajectoryRing, stop: threading.Event) -> Iterator[memoryview]:
    """The view is valid until the next one is asked for."""
    while not stop.is_set():
        frame = ring.peek(0.2)  # clean: retired after each yield
        if frame is None:
            continue
        view = memoryview(ring.mem)[frame.offset : frame.offset + frame.size]
        try:
            yield view
        finally:
            view.release()
            ring.retire(frame)


def stream_batches(ring: TrajectoryRing, size: int) -> Iterator[List[bytes]]:
    """Frames stay in the ring until their batch has been used; an incomplete batch ends the stream."""
    held: List[Frame] = []
    while True:
        frame = ring.peek(1.0)  # leak: frames of the incomplete last batch are never retired
        if frame is None:
            return
        held.append(frame)
        if len(held) == size:
            yield [bytes(ring.mem[f.offset : f.offset + f.size]) for f in held]
            for f in held:
                ring.retire(f)
            held = []
