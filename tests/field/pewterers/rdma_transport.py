"""Sends feature blocks to remote rankers over registered memory regions."""
from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from functools import partial
from typing import Callable, Deque, Dict, List, Optional, Tuple


class WcStatus(enum.Enum):
    SUCCESS = 0
    RETRY_EXC = 12
    FLUSH_ERR = 5


class MemoryRegion:
    __slots__ = ("lkey", "buf", "length")

    def __init__(self, lkey: int, size: int) -> None:
        self.lkey = lkey
        self.buf = bytearray(size)
        self.length = 0


class RegionPool:
    """Regions registered once with the NIC at start-up."""

    def __init__(self, count: int, size: int) -> None:
        self._cond = threading.Condition()
        self._idle: Deque[MemoryRegion] = deque(MemoryRegion(i, size) for i in range(count))

    def borrow(self, timeout: float = 0.0) -> Optional[MemoryRegion]:
        with self._cond:
            if not self._idle:
                self._cond.wait(timeout)
            return self._idle.popleft() if self._idle else None

    def give_back(self, mr: MemoryRegion) -> None:
        with self._cond:
            mr.length = 0
            self._idle.append(mr)
            self._cond.notify()

    def idle(self) -> int:
        return len(self._idle)


OnDone = Callable[[WcStatus], None]


class QueuePair:
    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._ids = itertools.count()
        self._posted: Dict[int, Tuple[MemoryRegion, OnDone]] = {}

    def full(self) -> bool:
        return len(self._posted) >= self.depth

    def post_send(self, mr: MemoryRegion, on_done: OnDone) -> int:
        wr_id = next(self._ids)
        self._posted[wr_id] = (mr, on_done)
        return wr_id

    def poll(self, status: WcStatus = WcStatus.SUCCESS) -> int:
        done = list(self._posted)
        for wr_id in done:
            _, on_done = self._posted.pop(wr_id)
            on_done(status)
        return len(done)


class FeatureSender:
    def __init__(self, pool: RegionPool, qp: QueuePair) -> None:
        self.pool = pool
        self.qp = qp
        self.errors = 0
        self._backlog: Deque[MemoryRegion] = deque()
        self._recv: Dict[int, MemoryRegion] = {}

    def _fill(self, mr: MemoryRegion, payload: bytes) -> None:
        mr.buf[:len(payload)] = payload
        mr.length = len(payload)

    def _complete(self, mr: MemoryRegion, status: WcStatus) -> None:
        if status is not WcStatus.SUCCESS:
            self.errors += 1
        self.pool.give_back(mr)

    def send(self, payload: bytes) -> bool:
        mr = self.pool.borrow()  # clean: the completion callback gives it back whatever the status
        if mr is None:
            return False
        self._fill(mr, payload)
        self.qp.post_send(mr, partial(self._complete, mr))
        return True

    def send_counted(self, payload: bytes, counter: List[int]) -> bool:
        mr = self.pool.borrow()  # leak: the callback returns before give_back on an error completion
        if mr is None:
            return False
        self._fill(mr, payload)

        def on_done(status: WcStatus) -> None:
            if status is not WcStatus.SUCCESS:
                self.errors += 1
                return
            counter[0] += 1
            self.pool.give_back(mr)

        self.qp.post_send(mr, on_done)
        return True

    def send_bounded(self, payload: bytes) -> bool:
        mr = self.pool.borrow()  # leak: payload too long returns False
        if mr is None:
            return False
        if len(payload) > len(mr.buf):
            self.errors += 1
            return False
        self._fill(mr, payload)
        self.qp.post_send(mr, partial(self._complete, mr))
        return True

    def enqueue(self, payload: bytes) -> bool:
        """Send now, or keep the filled region until the queue pair has room."""
        mr = self.pool.borrow()  # clean: near miss, posted or put on the backlog that flush() empties
        if mr is None:
            return False
        self._fill(mr, payload)
        if self.qp.full():
            self._backlog.append(mr)
            return True
        self.qp.post_send(mr, partial(self._complete, mr))
        return True

    def flush(self) -> int:
        posted = 0
        while self._backlog and not self.qp.full():
            mr = self._backlog.popleft()
            self.qp.post_send(mr, partial(self._complete, mr))
            posted += 1
        return posted

    def abort(self) -> None:
        while self._backlog:
            self.pool.give_back(self._backlog.popleft())

    def send_pair(self, header: bytes, body: bytes) -> bool:
        hdr = self.pool.borrow()  # clean: near miss, given back when the body region is missing
        if hdr is None:
            return False
        payload = self.pool.borrow()  # clean: posted with the completion callback
        if payload is None:
            self.pool.give_back(hdr)
            return False
        self._fill(hdr, header)
        self._fill(payload, body)
        self.qp.post_send(hdr, partial(self._complete, hdr))
        self.qp.post_send(payload, partial(self._complete, payload))
        return True

    def broadcast(self, payload: bytes, peers: List[QueuePair]) -> int:
        sent = 0
        for peer in peers:
            mr = self.pool.borrow(timeout=0.01)  # leak: continue for a full peer
            if mr is None:
                break
            self._fill(mr, payload)
            if peer.full():
                self.errors += 1
                continue
            peer.post_send(mr, partial(self._complete, mr))
            sent += 1
        return sent

    def post_receives(self, tags: List[int]) -> None:
        for tag in tags:
            if tag in self._recv:
                continue
            mr = self.pool.borrow()  # leak: on_receive pops the region and keeps only its bytes
            if mr is None:
                return
            self._recv[tag] = mr

    def on_receive(self, tag: int, length: int) -> Optional[bytes]:
        mr = self._recv.pop(tag, None)
        if mr is None:
            return None
        return bytes(mr.buf[:length])
