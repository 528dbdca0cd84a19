"""Shared-memory transport between capture and inference: segments are carved and reclaimed."""
from __future__ import annotations

import logging
import struct
import threading
import time
from collections import defaultdict, deque
from typing import Callable, NamedTuple, Optional

log = logging.getLogger("shm")
HEADER = struct.Struct("<IIQ")


class Segment(NamedTuple):
    offset: int
    length: int
    serial: int


class SegmentAllocator:
    """First fit over one mapping; neighbours are joined when segments come back."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))
        self._holes: list[tuple[int, int]] = [(0, size)]
        self._live: dict[int, Segment] = {}
        self._serial = 0
        self._mutex = threading.Lock()

    def carve(self, length: int) -> Optional[Segment]:
        with self._mutex:
            for index, (offset, size) in enumerate(self._holes):
                if size < length:
                    continue
                if size == length:
                    del self._holes[index]
                else:
                    self._holes[index] = (offset + length, size - length)
                self._serial += 1
                segment = Segment(offset, length, self._serial)
                self._live[segment.serial] = segment
                return segment
        return None

    def reclaim(self, segment: Segment) -> None:
        with self._mutex:
            if self._live.pop(segment.serial, None) is None:
                return
            self._holes.append((segment.offset, segment.length))
            self._holes.sort()
            joined: list[tuple[int, int]] = []
            for offset, size in self._holes:
                if joined and joined[-1][0] + joined[-1][1] == offset:
                    joined[-1] = (joined[-1][0], joined[-1][1] + size)
                else:
                    joined.append((offset, size))
            self._holes = joined

    def carve_retry(self, length: int, attempts: int) -> Optional[Segment]:
        for attempt in range(attempts):
            segment = self.carve(length)  # clean: handed to the caller at once
            if segment is not None:
                return segment
            time.sleep(0.001 * (attempt + 1))
        return None

    def bytes_of(self, segment: Segment) -> memoryview:
        return self.view[segment.offset : segment.offset + segment.length]


class Sender:
    """Segments stay with the sender until the peer acknowledges their serial."""

    def __init__(self, memory: SegmentAllocator, notify: Callable[[int], bool]) -> None:
        self.memory = memory
        self.notify = notify
        self.sequence = 0
        self._unacked: dict[int, Segment] = {}

    def _frame(self, payload: bytes, kind: int) -> Optional[Segment]:
        """A segment with header and payload, or None."""
        segment = self.memory.carve(HEADER.size + len(payload))  # clean: handed to the caller
        if segment is None:
            return None
        target = self.memory.bytes_of(segment)
        HEADER.pack_into(target, 0, kind, len(payload), self.sequence)
        target[HEADER.size :] = payload
        self.sequence += 1
        return segment

    def send(self, payload: bytes) -> bool:
        segment = self._frame(payload, 1)  # clean: near miss, acknowledge() and reset() reclaim
        if segment is None:
            return False
        self._unacked[segment.serial] = segment
        self.notify(segment.serial)
        return True

    def send_checked(self, payload: bytes) -> bool:
        segment = self._frame(payload, 1)  # leak: a peer that doesn't listen gets False, the segment stays live
        if segment is None:
            return False
        if not self.notify(segment.serial):
            log.info("peer does not listen, %d bytes not sent", len(payload))
            return False
        self._unacked[segment.serial] = segment
        return True

    def send_control(self, payload: bytes) -> bool:
        segment = self._frame(payload, 2)  # clean: near miss, reclaimed where the peer is away, else unacked
        if segment is None:
            return False
        if not self.notify(segment.serial):
            self.memory.reclaim(segment)
            return False
        self._unacked[segment.serial] = segment
        return True

    def send_split(self, payload: bytes, part: int) -> int:
        sent = 0
        for start in range(0, len(payload), part):
            segment = self._frame(payload[start : start + part], 3)  # leak: only the last segment is stored
            if segment is None:
                return sent
            self.notify(segment.serial)
            sent += 1
        if sent:
            self._unacked[segment.serial] = segment
        return sent

    def acknowledge(self, serial: int) -> None:
        segment = self._unacked.pop(serial, None)
        if segment is not None:
            self.memory.reclaim(segment)

    def reset(self) -> None:
        for segment in self._unacked.values():
            self.memory.reclaim(segment)
        self._unacked.clear()
        self.sequence = 0


class Broadcast:
    """One segment per topic and subscriber."""

    def __init__(self, memory: SegmentAllocator) -> None:
        self.memory = memory
        self._boxes: dict[str, deque[Segment]] = defaultdict(deque)
        self._latest: dict[str, Segment] = {}

    def deliver(self, subscriber: str, payload: bytes) -> bool:
        segment = self.memory.carve_retry(len(payload), 3)  # leak: unsubscribe() pops the whole box unreclaimed
        if segment is None:
            return False
        self.memory.bytes_of(segment)[:] = payload
        self._boxes[subscriber].append(segment)
        return True

    def receive(self, subscriber: str) -> Optional[bytes]:
        box = self._boxes.get(subscriber)
        if not box:
            return None
        segment = box.popleft()
        data = bytes(self.memory.bytes_of(segment))
        self.memory.reclaim(segment)
        return data

    def unsubscribe(self, subscriber: str) -> int:
        box = self._boxes.pop(subscriber, None)
        return len(box) if box else 0

    def publish_latest(self, topic: str, payload: bytes) -> bool:
        segment = self.memory.carve(len(payload))  # clean: near miss, the old one is reclaimed, retire()
        if segment is None:
            return False
        self.memory.bytes_of(segment)[:] = payload
        old = self._latest.get(topic)
        self._latest[topic] = segment
        if old is not None:
            self.memory.reclaim(old)
        return True

    def retire(self, topic: str) -> None:
        if topic in self._latest:
            self.memory.reclaim(self._latest.pop(topic))


class Worker(threading.Thread):
    """Takes payloads from a list, transforms them in a scratch segment and reports the result."""

    def __init__(self, memory: SegmentAllocator, report: Callable[[bytes], None]) -> None:
        super().__init__(daemon=True)
        self.memory = memory
        self.report = report
        self.inbox: deque[bytes] = deque()
        self.halted = threading.Event()

    def run(self) -> None:
        while not self.halted.is_set():
            if not self.inbox:
                self.halted.wait(0.01)
                continue
            payload = self.inbox.popleft()
            scratch = self.memory.carve(len(payload))  # clean: reclaimed in finally of each turn
            if scratch is None:
                self.inbox.appendleft(payload)
                continue
            try:
                self._transform(payload, scratch)
            finally:
                self.memory.reclaim(scratch)

    def _transform(self, payload: bytes, scratch: Segment) -> None:
        target = self.memory.bytes_of(scratch)
        for i, value in enumerate(payload):
            target[i] = value ^ 0x5A
        self.report(bytes(target))

    def transform_now(self, payload: bytes) -> Optional[bytes]:
        scratch = self.memory.carve(len(payload))  # leak: the copy is returned, scratch stays live
        if scratch is None:
            return None
        self.memory.bytes_of(scratch)[:] = payload
        return bytes(self.memory.bytes_of(scratch))[::-1]
