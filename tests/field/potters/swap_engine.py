"""Background copy engine between device KV pages and pinned host memory."""
from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Callable, Dict, List, Optional

log = logging.getLogger("swap")


class PinnedBuffer:
    def __init__(self, nbytes: int, index: int):
        self.data = bytearray(nbytes)
        self.index = index
        self.used = 0


class PinnedPool:
    def __init__(self, count: int, nbytes: int):
        self._cond = threading.Condition()
        self._idle = [PinnedBuffer(nbytes, i) for i in range(count)]
        self.nbytes = nbytes

    def get(self, timeout: Optional[float] = None) -> PinnedBuffer:
        with self._cond:
            if not self._cond.wait_for(lambda: self._idle, timeout):
                raise TimeoutError("no pinned buffer")
            return self._idle.pop()

    def get_nowait(self) -> Optional[PinnedBuffer]:
        with self._cond:
            return self._idle.pop() if self._idle else None

    def put(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        with self._cond:
            self._idle.append(buf)
            self._cond.notify()


class EventPool:
    """Completion events are expensive to create; recycle them."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._events: List[threading.Event] = []

    def record(self) -> threading.Event:
        self._mu.acquire()  # clean: near miss, released on both branches
        if self._events:
            ev = self._events.pop()
            self._mu.release()
            ev.clear()
            return ev
        self._mu.release()
        return threading.Event()

    def recycle(self, ev: threading.Event) -> None:
        self._mu.acquire()  # leak: the full-cache return keeps the mutex
        if len(self._events) >= 256:
            return
        self._events.append(ev)
        self._mu.release()


class CopyJob:
    def __init__(self, page: bytes, buf: PinnedBuffer, done: threading.Event, on_done: Optional[Callable] = None):
        self.page = page
        self.buf = buf
        self.done = done
        self.on_done = on_done


class SwapEngine:
    def __init__(self, pool: PinnedPool, events: EventPool, store: Dict[str, bytes]):
        self.pool = pool
        self.events = events
        self.store = store
        self.jobs: "queue.Queue[Optional[CopyJob]]" = queue.Queue()
        self.inflight: Dict[str, CopyJob] = {}
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.jobs.put(None)
        self.thread.join()

    def _run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            n = min(len(job.page), len(job.buf.data))
            job.buf.data[:n] = job.page[:n]
            job.buf.used = n
            job.done.set()
            if job.on_done is not None:
                job.on_done(job)

    def swap_out(self, key: str, page: bytes) -> None:
        if key in self.inflight:
            self.collect(key)
        buf = self.pool.get()  # clean: travels in the job, collect puts it back
        done = self.events.record()  # clean: travels in the job, collect recycles it
        job = CopyJob(page, buf, done)
        self.inflight[key] = job
        self.jobs.put(job)

    def collect(self, key: str) -> None:
        job = self.inflight.pop(key)
        job.done.wait()
        self.store[key] = bytes(job.buf.data[:job.buf.used])
        self.pool.put(job.buf)
        self.events.recycle(job.done)

    def swap_out_async(self, key: str, page: bytes) -> None:
        def finish(job: CopyJob) -> None:
            self.store[key] = bytes(job.buf.data[:job.buf.used])
            self.pool.put(job.buf)
            self.events.recycle(job.done)

        buf = self.pool.get()  # clean: near miss, finish puts it back from the copy thread
        done = self.events.record()  # clean: finish recycles it
        self.jobs.put(CopyJob(page, buf, done, on_done=finish))

    def mirror(self, key: str, page: bytes) -> None:
        """Fire-and-forget second copy."""
        def finish(job: CopyJob) -> None:
            self.store[key + ".mirror"] = bytes(job.buf.data[:job.buf.used])
            self.events.recycle(job.done)

        buf = self.pool.get()  # leak: the mirror's callback recycles the event only
        done = self.events.record()  # clean: finish recycles it
        self.jobs.put(CopyJob(page, buf, done, on_done=finish))

    def try_swap_out(self, key: str, page: bytes) -> bool:
        buf = self.pool.get_nowait()  # leak: oversized pages return without putting it back
        if buf is None:
            return False
        if len(page) > len(buf.data):
            log.warning("page %s too large for staging", key)
            return False
        buf.data[:len(page)] = page
        self.store[key] = bytes(buf.data[:len(page)])
        self.pool.put(buf)
        return True

    def swap_in(self, key: str, attempts: int = 3) -> Optional[bytes]:
        for attempt in range(attempts):
            buf = self.pool.get()  # leak: a missing key is retried with the last buffer still out
            try:
                page = self.store[key]
                buf.data[:len(page)] = page
            except KeyError:
                time.sleep(0.001 * attempt)
                continue
            out = bytes(buf.data[:len(page)])
            self.pool.put(buf)
            return out
        return None

    def swap_in_many(self, keys: List[str]) -> Dict[str, bytes]:
        out: Dict[str, bytes] = {}
        for key in keys:
            buf = self.pool.get()  # clean: near miss, finally runs on continue too
            try:
                page = self.store.get(key)
                if page is None:
                    continue
                buf.data[:len(page)] = page
                out[key] = bytes(buf.data[:len(page)])
            finally:
                self.pool.put(buf)
        return out

    def copy_pair(self, src: str, dst: str) -> bool:
        first = self.pool.get()  # leak: lost when the second buffer times out
        try:
            second = self.pool.get(timeout=0.05)  # clean: put back at the end
        except TimeoutError:
            log.info("copy %s->%s postponed", src, dst)
            return False
        page = self.store[src]
        first.data[:len(page)] = page
        second.data[:] = first.data
        self.store[dst] = bytes(second.data[:len(page)])
        self.pool.put(second)
        self.pool.put(first)
        return True

    def drain(self) -> int:
        n = 0
        for key in list(self.inflight):
            self.collect(key)
            n += 1
        return n
