"""KV offload to pinned host memory and on to disk, by worker threads."""
from __future__ import annotations

import concurrent.futures as cf
import os
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, Optional


class PinnedBuffer:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.used = 0

    def write(self, payload: bytes) -> int:
        n = min(len(payload), len(self.data) - self.used)
        self.data[self.used:self.used + n] = payload[:n]
        self.used += n
        return n


class PinnedBufferPool:
    def __init__(self, count: int, nbytes: int) -> None:
        self._q: queue.SimpleQueue[PinnedBuffer] = queue.SimpleQueue()
        for _ in range(count):
            self._q.put(PinnedBuffer(nbytes))

    def acquire_buffer(self) -> PinnedBuffer:
        return self._q.get()

    def try_acquire_buffer(self) -> Optional[PinnedBuffer]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def release_buffer(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        self._q.put(buf)


class IoBudget:
    """Bytes that may be on their way to disk."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._cond = threading.Condition()
        self._out = 0

    def charge(self, nbytes: int) -> None:
        with self._cond:
            while self._out + nbytes > self._limit:
                self._cond.wait()
            self._out += nbytes

    def try_charge(self, nbytes: int) -> bool:
        with self._cond:
            if self._out + nbytes > self._limit:
                return False
            self._out += nbytes
            return True

    def refund(self, nbytes: int) -> None:
        with self._cond:
            self._out -= nbytes
            self._cond.notify_all()


@dataclass
class OffloadJob:
    key: str
    payload: bytes
    buffer: Optional[PinnedBuffer] = None
    charged: int = 0
    done: threading.Event = field(default_factory=threading.Event)


class OffloadManager:
    def __init__(self, pool: PinnedBufferPool, budget: IoBudget, root: Path, workers: int = 4) -> None:
        self.pool = pool
        self.budget = budget
        self.root = root
        self._exec = cf.ThreadPoolExecutor(workers)
        self._jobs: "queue.Queue[Optional[OffloadJob]]" = queue.Queue()
        self._resident: dict[str, PinnedBuffer] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._writer, daemon=True)
        self._thread.start()

    def offload(self, key: str, payload: bytes) -> Optional[OffloadJob]:
        job = OffloadJob(key, payload)
        job.buffer = self.pool.try_acquire_buffer()  # clean: the writer thread releases job.buffer
        if job.buffer is None:
            return None
        self.budget.charge(len(payload))  # clean: near miss, the writer refunds job.charged
        job.charged = len(payload)
        job.buffer.write(payload)
        self._jobs.put(job)
        return job

    def _writer(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            with open(self.root / job.key, "wb") as out:  # clean: closed by with
                out.write(job.buffer.data[:job.buffer.used])
            self.pool.release_buffer(job.buffer)
            self.budget.refund(job.charged)
            job.done.set()

    def offload_small(self, key: str, payload: bytes) -> bool:
        """In the caller's thread, when nothing else is waiting."""
        if not self.budget.try_charge(len(payload)):  # leak: without a buffer False is returned, no refund
            return False
        buf = self.pool.try_acquire_buffer()  # clean: released after the write
        if buf is None:
            return False
        buf.write(payload)
        (self.root / key).write_bytes(bytes(buf.data[:buf.used]))
        self.pool.release_buffer(buf)
        self.budget.refund(len(payload))
        return True

    def offload_parts(self, key: str, parts: list[bytes]) -> int:
        written = 0
        for i, part in enumerate(parts):
            buf = self.pool.acquire_buffer()  # leak: a short write breaks off before the release
            n = buf.write(part)
            if n < len(part):
                break
            (self.root / f"{key}.{i}").write_bytes(bytes(buf.data[:n]))
            written += n
            self.pool.release_buffer(buf)
        return written

    def offload_future(self, key: str, payload: bytes) -> "cf.Future[int]":
        buf = self.pool.acquire_buffer()  # clean: near miss, the future's callback releases it
        buf.write(payload)
        fut = self._exec.submit((self.root / key).write_bytes, bytes(buf.data[:buf.used]))
        fut.add_done_callback(lambda _f, b=buf: self.pool.release_buffer(b))
        return fut

    def offload_logged(self, items: dict[str, bytes], log: Callable[[str], None]) -> int:
        count = 0
        for key, payload in items.items():
            size = len(payload)
            self.budget.charge(size)  # leak: the completion callback logs only, nobody refunds
            fut = self._exec.submit((self.root / key).write_bytes, payload)
            fut.add_done_callback(lambda f, k=key: log(f"{k}: {f.result()}"))
            count += 1
        return count

    # -- reading back ---------------------------------------------------------------------------

    def fetch(self, key: str) -> Optional[PinnedBuffer]:
        """The caller releases the buffer."""
        path = self.root / key
        if not path.exists():
            return None
        buf = self.pool.acquire_buffer()  # clean: handed to the caller
        buf.write(path.read_bytes())
        return buf

    def fetch_bytes(self, key: str) -> Optional[bytes]:
        buf = self.fetch(key)  # leak: copied out, then dropped
        if buf is None:
            return None
        return bytes(buf.data[:buf.used])

    def make_resident(self, key: str) -> bool:
        with self._lock:
            if key in self._resident:
                return True
            buf = self.fetch(key)  # clean: filed under the key, evict() releases it
            if buf is None:
                return False
            self._resident[key] = buf
            return True

    def evict(self, key: str) -> None:
        with self._lock:
            buf = self._resident.pop(key, None)
        if buf is not None:
            self.pool.release_buffer(buf)

    def read_ahead(self, keys: list[str]) -> Iterator[bytes]:
        """Keeps one buffer ahead of the consumer."""
        ahead: Optional[PinnedBuffer] = None
        for key in keys:
            nxt = self.fetch(key)  # clean: becomes ahead, released a round later or at the end
            if ahead is not None:
                yield bytes(ahead.data[:ahead.used])
                self.pool.release_buffer(ahead)
            ahead = nxt
        if ahead is not None:
            yield bytes(ahead.data[:ahead.used])
            self.pool.release_buffer(ahead)

    def total(self, keys: list[str]) -> int:
        return sum(len(chunk) for chunk in self.read_ahead(keys))

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._exec.shutdown(wait=True)
        for key in list(self._resident):
            self.evict(key)


class SpillFile:
    """Append-only spill of pages; one handle for data and one for the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: BinaryIO = open(path, "ab")  # clean: closed in close()
        self._index: BinaryIO = open(path.with_suffix(".idx"), "ab")  # leak: close() only flushes the index
        self.offset = os.path.getsize(path)

    def append(self, payload: bytes) -> int:
        at = self.offset
        self._data.write(payload)
        self._index.write(at.to_bytes(8, "little"))
        self.offset += len(payload)
        return at

    def close(self) -> None:
        self._index.flush()
        self._data.close()


def load_index(path: Path) -> list[int]:
    handle = open(path, "rb")  # leak: an empty index returns without close
    head = handle.read(8)
    if not head:
        return []
    entries = [int.from_bytes(head, "little")]
    while chunk := handle.read(8):
        entries.append(int.from_bytes(chunk, "little"))
    handle.close()
    return entries
