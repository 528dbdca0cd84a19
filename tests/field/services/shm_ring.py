"""Shared-memory ring between the HTTP front end and the model process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import shared_memory

import numpy as np

log = logging.getLogger("shm")

EMPTY, WRITING, READY = 0, 1, 2


class RingFull(Exception):
    pass


@dataclass(slots=True)
class Frame:
    index: int
    view: np.ndarray


class ShmRing:
    def __init__(self, name: str, frames: int, size: int, create: bool = False) -> None:
        self.frames = frames
        self.size = size
        self.shm = shared_memory.SharedMemory(name=name, create=create, size=frames * size)  # clean: close() closes it
        self.state = [EMPTY] * frames
        self.head = 0

    def close(self) -> None:
        self.shm.close()

    def reserve(self) -> Frame:
        for step in range(self.frames):
            i = (self.head + step) % self.frames
            if self.state[i] == EMPTY:
                self.state[i] = WRITING
                self.head = (i + 1) % self.frames
                view = np.ndarray((self.size,), np.uint8, self.shm.buf, i * self.size)
                return Frame(i, view)
        raise RingFull

    def unreserve(self, frame: Frame) -> None:
        self.state[frame.index] = EMPTY

    def publish(self, frame: Frame) -> None:
        """The reader now owns the frame and will unreserve it."""
        self.state[frame.index] = READY

    def ready(self) -> Iterator[Frame]:
        for i, s in enumerate(self.state):
            if s == READY:
                yield Frame(i, np.ndarray((self.size,), np.uint8, self.shm.buf, i * self.size))

    @contextmanager
    def scratch(self) -> Iterator[np.ndarray]:
        frame = self.reserve()  # clean: finally
        try:
            yield frame.view
        finally:
            self.unreserve(frame)

    @contextmanager
    def scratch_unless(self, skip: bool) -> Iterator[np.ndarray | None]:
        frame = self.reserve()  # leak: the skip branch yields and returns without unreserve
        if skip:
            yield None
            return
        try:
            yield frame.view
        finally:
            self.unreserve(frame)


class Writer:
    def __init__(self, ring: ShmRing) -> None:
        self.ring = ring
        self.pending: list[Frame] = []
        self.current: Frame | None = None

    def write(self, payload: bytes) -> None:
        if len(payload) > self.ring.size:
            raise ValueError("payload larger than frame")
        frame = self.ring.reserve()  # clean: published to the reader
        frame.view[: len(payload)] = np.frombuffer(payload, np.uint8)
        self.ring.publish(frame)

    def write_late_check(self, payload: bytes) -> None:
        frame = self.ring.reserve()  # leak: the raise leaves the frame in WRITING
        if len(payload) > frame.view.nbytes:
            raise ValueError("payload larger than frame")
        frame.view[: len(payload)] = np.frombuffer(payload, np.uint8)
        self.ring.publish(frame)

    def open_frame(self) -> None:
        if self.current is None:
            self.current = self.ring.reserve()  # clean: close_frame() publishes or unreserves it

    def restart_frame(self) -> None:
        """Throw away what was written so far."""
        self.current = self.ring.reserve()  # leak: the half-written frame is overwritten and stays WRITING

    def close_frame(self, send: bool) -> None:
        if self.current is None:
            return
        if send:
            self.ring.publish(self.current)
        else:
            self.ring.unreserve(self.current)
        self.current = None

    def stage(self, payloads: list[bytes]) -> int:
        for p in payloads:
            try:
                frame = self.ring.reserve()  # clean: kept in pending, which flush() or abort() empties
            except RingFull:
                break
            frame.view[: len(p)] = np.frombuffer(p, np.uint8)
            self.pending.append(frame)
        return len(self.pending)

    def flush(self) -> None:
        for frame in self.pending:
            self.ring.publish(frame)
        self.pending.clear()

    def abort(self) -> None:
        for frame in self.pending:
            self.ring.unreserve(frame)
        self.pending = []

    def write_pair(self, meta: bytes, data: bytes) -> bool:
        try:
            a = self.ring.reserve()  # leak: the handler for a full ring forgets the first frame
            b = self.ring.reserve()  # clean: published with the first
        except RingFull:
            log.warning("ring full")
            return False
        a.view[: len(meta)] = np.frombuffer(meta, np.uint8)
        b.view[: len(data)] = np.frombuffer(data, np.uint8)
        self.ring.publish(a)
        self.ring.publish(b)
        return True

    def write_pair_all_or_none(self, meta: bytes, data: bytes) -> bool:
        frames: list[Frame] = []
        try:
            for _ in range(2):
                frames.append(self.ring.reserve())  # clean: near miss, the handler unreserves those it has
        except RingFull:
            for f in frames:
                self.ring.unreserve(f)
            return False
        for f, p in zip(frames, (meta, data)):
            f.view[: len(p)] = np.frombuffer(p, np.uint8)
            self.ring.publish(f)
        return True


def checksum(ring: ShmRing, payload: bytes) -> int:
    with ring.scratch() as view:  # clean: with statement
        view[: len(payload)] = np.frombuffer(payload, np.uint8)
        return int(view.sum())


def read_segment(name: str, n: int) -> bytes:
    fh = open(f"{name}.meta", "rb")  # clean: closed before both returns
    declared = int.from_bytes(fh.read(4), "little")
    if declared < n:
        fh.close()
        return b""
    body = fh.read(n)
    fh.close()
    return body
