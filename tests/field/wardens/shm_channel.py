from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any, Iterator, Optional

logger = logging.getLogger(__name__)


class SegmentPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._segments = [shared_memory.SharedMemory(create=True, size=nbytes) for _ in range(count)]  # clean: owned by the pool, destroy() closes and unlinks
        self._free = deque(range(count))
        self._lock = threading.Lock()

    def acquire_segment(self) -> Optional[int]:
        with self._lock:
            return self._free.popleft() if self._free else None

    def release_segment(self, idx: int) -> None:
        with self._lock:
            self._free.append(idx)

    def acquire_for(self, nbytes: int) -> Optional[int]:
        idx = self.acquire_segment()  # leak: a message larger than a segment returns None with the segment taken
        if nbytes > self.nbytes:
            return None
        return idx

    def buffer(self, idx: int) -> memoryview:
        return self._segments[idx].buf

    def destroy(self) -> None:
        for segment in self._segments:
            segment.close()
            segment.unlink()


class CreditWindow:
    def __init__(self, credits: int) -> None:
        self._sem = threading.Semaphore(credits)

    def take_credit(self, timeout: Optional[float] = None) -> bool:
        return self._sem.acquire(timeout=timeout)  # clean: the credit belongs to the caller

    def return_credit(self) -> None:
        self._sem.release()


@dataclass(frozen=True)
class Envelope:
    segment: int
    size: int
    topic: str


class ShmChannel:
    def __init__(self, pool: SegmentPool, window: CreditWindow) -> None:
        self.pool = pool
        self.window = window
        self.outbox: deque[Envelope] = deque()
        self.parked: dict[str, Envelope] = {}

    def send(self, topic: str, payload: Any) -> bool:
        data = pickle.dumps(payload)
        if not self.window.take_credit(timeout=5.0):  # leak: no segment returns False without return_credit
            return False
        idx = self.pool.acquire_for(len(data))  # clean: near miss, goes into the outbox and recv or purge releases it
        if idx is None:
            return False
        self.pool.buffer(idx)[: len(data)] = data
        self.outbox.append(Envelope(idx, len(data), topic))
        return True

    def try_send(self, topic: str, data: bytes) -> bool:
        idx = self.pool.acquire_segment()  # clean: near miss, released on both refusals, else goes into the outbox
        if idx is None:
            return False
        if len(data) > self.pool.nbytes:
            self.pool.release_segment(idx)
            return False
        if not self.window.take_credit(timeout=0.0):  # clean: near miss, not held when refused, recv returns it with the envelope
            self.pool.release_segment(idx)
            return False
        self.pool.buffer(idx)[: len(data)] = data
        self.outbox.append(Envelope(idx, len(data), topic))
        return True

    def recv(self) -> Optional[tuple[str, Any]]:
        if not self.outbox:
            return None
        env = self.outbox.popleft()
        try:
            payload = pickle.loads(self.pool.buffer(env.segment)[: env.size])
        except pickle.UnpicklingError:
            logger.error("corrupt message on %s", env.topic)
            return None
        finally:
            self.pool.release_segment(env.segment)
            self.window.return_credit()
        return env.topic, payload

    def purge(self, topic: str) -> int:
        kept: deque[Envelope] = deque()
        dropped = 0
        while self.outbox:
            env = self.outbox.popleft()
            if env.topic != topic:
                kept.append(env)
                continue
            self.pool.release_segment(env.segment)
            self.window.return_credit()
            dropped += 1
        self.outbox = kept
        return dropped

    def park(self, key: str, data: bytes) -> bool:
        if len(data) > self.pool.nbytes:
            return False
        idx = self.pool.acquire_segment()  # leak: a key parked already is overwritten and its segment lost
        if idx is None:
            return False
        self.pool.buffer(idx)[: len(data)] = data
        self.parked[key] = Envelope(idx, len(data), key)
        return True

    def park_once(self, key: str, data: bytes) -> bool:
        if key in self.parked or len(data) > self.pool.nbytes:
            return False
        idx = self.pool.acquire_segment()  # clean: near miss, only for new keys, unpark and close release it
        if idx is None:
            return False
        self.pool.buffer(idx)[: len(data)] = data
        self.parked[key] = Envelope(idx, len(data), key)
        return True

    def unpark(self, key: str) -> Optional[bytes]:
        env = self.parked.pop(key, None)
        if env is None:
            return None
        data = bytes(self.pool.buffer(env.segment)[: env.size])
        self.pool.release_segment(env.segment)
        return data

    @contextmanager
    def scratch(self) -> Iterator[Optional[memoryview]]:
        idx = self.pool.acquire_segment()  # clean: near miss, None yields nothing, else released in finally
        if idx is None:
            yield None
            return
        try:
            yield self.pool.buffer(idx)
        finally:
            self.pool.release_segment(idx)

    def relay(self, other: ShmChannel) -> int:
        moved = 0
        while self.outbox and other.window.take_credit(timeout=0.0):  # leak: an envelope without a segment on the other side breaks without return_credit
            idx = other.pool.acquire_segment()  # clean: near miss, None breaks, else appended to the other outbox
            if idx is None:
                break
            env = self.outbox.popleft()
            other.pool.buffer(idx)[: env.size] = self.pool.buffer(env.segment)[: env.size]
            other.outbox.append(Envelope(idx, env.size, env.topic))
            self.pool.release_segment(env.segment)
            self.window.return_credit()
            moved += 1
        return moved

    def checksum(self, data: bytes) -> int:
        with self.scratch() as view:  # clean: near miss, return inside the with
            if view is None or len(data) > len(view):
                return -1
            view[: len(data)] = data
            return sum(view[: len(data)]) & 0xFFFF

    def close(self) -> None:
        for topic in {env.topic for env in self.outbox}:
            self.purge(topic)
        for key in list(self.parked):
            self.unpark(key)
