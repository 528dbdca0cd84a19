"""Threaded stages of an ingestion service: queues of tasks that carry pooled buffers and permits."""
from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass


class BufferPool:
    def __init__(self, size: int, count: int) -> None:
        self._guard = threading.Lock()
        self._size = size
        self._stack = [bytearray(size) for _ in range(count)]

    def grab(self) -> bytearray:
        with self._guard:
            return self._stack.pop() if self._stack else bytearray(self._size)

    def put_away(self, buf: bytearray) -> None:
        with self._guard:
            self._stack.append(buf)


class Permits:
    def __init__(self, n: int) -> None:
        self._sem = threading.Semaphore(n)

    def obtain(self) -> "Permit":
        self._sem.acquire()  # clean: the Permit that is returned stands for it
        return Permit(self)

    def give_back(self) -> None:
        self._sem.release()


@dataclass
class Permit:
    owner: Permits

    def end(self) -> None:
        self.owner.give_back()


@dataclass
class Task:
    key: str
    buf: bytearray
    length: int
    permit: Permit
    born: float = 0.0


class Stage(ABC):
    """Runs `work` on tasks of its inbox; `discard` is called for tasks that are too old."""

    max_age = 2.0

    def __init__(self, pool: BufferPool, permits: Permits, depth: int) -> None:
        self.pool = pool
        self.permits = permits
        self.inbox: queue.Queue[Task] = queue.Queue(depth)
        self.discarded = 0

    @abstractmethod
    def feed(self, key: str, payload: bytes) -> None: ...

    @abstractmethod
    def work(self, task: Task) -> None: ...

    def discard(self, task: Task) -> None:
        self.discarded += 1
        self.pool.put_away(task.buf)
        task.permit.end()

    def step(self) -> None:
        task = self.inbox.get()
        if time.monotonic() - task.born > self.max_age:
            self.discard(task)
            return
        self.work(task)
        self.pool.put_away(task.buf)
        task.permit.end()


class Tokenize(Stage):
    def __init__(self, pool: BufferPool, permits: Permits, depth: int, vocab) -> None:
        super().__init__(pool, permits, depth)
        self.vocab = vocab
        self.counts: dict[str, int] = {}

    def feed(self, key: str, payload: bytes) -> None:
        permit = self.permits.obtain()  # clean: near miss, step ends it, or the base's discard
        buf = self.pool.grab()  # clean: near miss, step puts it away, or the base's discard
        buf[: len(payload)] = payload
        self.inbox.put(Task(key, buf, len(payload), permit, time.monotonic()))

    def work(self, task: Task) -> None:
        self.counts[task.key] = len(self.vocab.encode(bytes(task.buf[: task.length])))


class Classify(Stage):
    max_age = 0.5

    def __init__(self, pool: BufferPool, permits: Permits, depth: int, model) -> None:
        super().__init__(pool, permits, depth)
        self.model = model
        self.late: dict[str, int] = {}

    def feed(self, key: str, payload: bytes) -> None:
        permit = self.permits.obtain()  # leak: discard of this class notes the key and leaves the permit
        buf = self.pool.grab()  # clean: near miss, the overriding discard still puts the buffer away
        buf[: len(payload)] = payload
        self.inbox.put(Task(key, buf, len(payload), permit, time.monotonic()))

    def work(self, task: Task) -> None:
        self.model.score(task.key, memoryview(task.buf)[: task.length])

    def discard(self, task: Task) -> None:
        self.late[task.key] = self.late.get(task.key, 0) + 1
        self.pool.put_away(task.buf)


class MicroBatcher:
    """Collects buffers by key and hands them to the model when a key has enough of them, or in time."""

    def __init__(self, pool: BufferPool, model, want: int) -> None:
        self.pool = pool
        self.model = model
        self.want = want
        self._lock = threading.Lock()
        self._open: dict[str, list[bytearray]] = {}
        self._latest: dict[str, bytearray] = {}
        self._first: dict[str, bytearray] = {}

    def add(self, key: str, payload: bytes) -> bool:
        buf = self.pool.grab()  # leak: a key that timed out is popped by time_out for its length alone
        buf[: len(payload)] = payload
        with self._lock:
            members = self._open.setdefault(key, [])
            members.append(buf)
            full = len(members) >= self.want
            ready = self._open.pop(key) if full else []
        if not ready:
            return False
        self.model.run(key, ready)
        for member in ready:
            self.pool.put_away(member)
        return True

    def time_out(self, keys: list[str]) -> int:
        late = 0
        with self._lock:
            for key in keys:
                late += len(self._open.pop(key, ()))
        return late

    def remember(self, key: str, payload: bytes) -> None:
        """Newest payload by key."""
        buf = self.pool.grab()  # clean: near miss, the buffer that was under the key is put away
        buf[: len(payload)] = payload
        with self._lock:
            old, self._latest[key] = self._latest.get(key), buf
        if old is not None:
            self.pool.put_away(old)

    def remember_first(self, key: str, payload: bytes) -> bool:
        """First payload by key; the ones that follow are compared with it."""
        buf = self.pool.grab()  # leak: where the key has a first already, this one is compared and dropped
        buf[: len(payload)] = payload
        with self._lock:
            first = self._first.get(key)
            if first is None:
                self._first[key] = buf
                return True
        return first == buf

    def forget(self, key: str) -> None:
        with self._lock:
            pair = (self._latest.pop(key, None), self._first.pop(key, None))
        for buf in pair:
            if buf is not None:
                self.pool.put_away(buf)
