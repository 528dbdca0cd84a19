# Embedding server: callers reserve a slot, workers batch what is queued. Plain threads.
import heapq
import logging
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("embed")


class Busy(Exception):
    pass


class NoDevice(Exception):
    pass


class CudaError(RuntimeError):
    pass


class SlotRing:
    def __init__(self, count):
        self._sem = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._free = list(range(count))
        self._closed = False

    def reserve(self, timeout):
        if not self._sem.acquire(timeout=timeout):  # leak: a ring that is closed returns below with the permit taken
            return None
        with self._lock:
            if self._closed:
                return None
            return self._free.pop()  # clean: returned to the caller

    def release(self, slot):
        with self._lock:
            self._free.append(slot)
        self._sem.release()

    def close(self):
        with self._lock:
            self._closed = True


class Lease:
    def __init__(self, owner, load, device):
        self.owner, self.load, self.device = owner, load, device
        self.open = True

    def close(self, failed=False):
        if self.open:
            self.open = False
            self.owner.put_back(self, failed)


class DevicePool:
    """Hands out the device with the least load; a failed one comes back with a penalty."""

    def __init__(self, devices):
        self._lock = threading.Lock()
        self._heap = [(0, d) for d in devices]

    def lease(self):
        with self._lock:
            if not self._heap:
                raise NoDevice()
            load, device = heapq.heappop(self._heap)  # clean: returned to the caller inside the lease
        return Lease(self, load, device)

    def put_back(self, lease, failed):
        with self._lock:
            heapq.heappush(self._heap, (lease.load + (100 if failed else 1), lease.device))


class Tokenizers:
    def __init__(self, make, count):
        self._q = queue.Queue()
        for _ in range(count):
            self._q.put(make())

    def get(self, timeout):
        return self._q.get(timeout=timeout)  # clean: returned to the caller

    def put(self, tok):
        self._q.put(tok)

    @contextmanager
    def borrowed(self):
        tok = self._q.get()  # clean: the finally puts it back
        try:
            yield tok
        finally:
            self._q.put(tok)


@dataclass(eq=False)
class Job:
    text: str
    slot: int
    deadline: float
    future: Future = field(default_factory=Future)


@dataclass(eq=False)
class Group:
    texts: list
    slots: list
    future: Future = field(default_factory=Future)

    def finish(self, ring):
        for slot in self.slots:
            ring.release(slot)
        self.slots = []


class EmbedServer:
    def __init__(self, ring, devices, toks, embed, max_batch=32):
        self.ring, self.devices, self.toks = ring, devices, toks
        self.embed = embed
        self.max_batch = max_batch
        self._inbox = queue.Queue()
        self._streams = {}
        self._probe = None
        self._stop = threading.Event()
        self.expired = 0

    def submit(self, text, timeout=0.5):
        slot = self.ring.reserve(timeout)  # leak: the future of an expired job is never completed, so its callback never runs
        if slot is None:
            return None
        job = Job(text, slot, time.monotonic() + 10)
        job.future.add_done_callback(lambda _f: self.ring.release(job.slot))
        self._inbox.put(job)
        return job.future

    def submit_many(self, texts):
        slots = []
        for _ in texts:
            slot = self.ring.reserve(0)  # clean: near miss, all are released on shortage, else the group has them and finish() releases
            if slot is None:
                for s in slots:
                    self.ring.release(s)
                raise Busy(f"{len(texts)} slots wanted")
            slots.append(slot)
        group = Group(list(texts), slots)
        self._inbox.put(group)
        return group.future

    def embed_now(self, text):
        slot = self.ring.reserve(0)  # leak: no tokenizer within the time returns with the slot reserved
        if slot is None:
            return None
        try:
            tok = self.toks.get(timeout=0.1)  # clean: Empty means there is none, otherwise the finally puts it back
        except queue.Empty:
            log.info("no tokenizer free")
            return None
        try:
            ids = tok(text)
        finally:
            self.toks.put(tok)
        try:
            return self.embed([ids], 0)[0]
        finally:
            self.ring.release(slot)

    def open_stream(self, sid):
        slot = self.ring.reserve(1.0)  # leak: a stream that is opened twice overwrites its slot
        if slot is None:
            return False
        self._streams[sid] = slot
        return True

    def close_stream(self, sid):
        slot = self._streams.pop(sid, None)
        if slot is not None:
            self.ring.release(slot)

    def _next_jobs(self):
        jobs = []
        while len(jobs) < self.max_batch:
            try:
                item = self._inbox.get(timeout=0.01)
            except queue.Empty:
                break
            if isinstance(item, Group):
                self._run_group(item)
                continue
            if item.deadline < time.monotonic():
                self.expired += 1
                continue
            jobs.append(item)
        return jobs

    def _run_group(self, group):
        try:
            with self.toks.borrowed() as tok:  # clean: the context manager puts it back
                ids = [tok(t) for t in group.texts]
            group.future.set_result(self.embed(ids, 0))
        except CudaError as exc:
            group.future.set_exception(exc)
        finally:
            group.finish(self.ring)

    def worker(self):
        lease = self.devices.lease()  # clean: near miss, closed before it is replaced and by the finally
        try:
            while not self._stop.is_set():
                jobs = self._next_jobs()
                if not jobs:
                    continue
                with self.toks.borrowed() as tok:  # clean: the context manager puts it back
                    ids = [tok(j.text) for j in jobs]
                try:
                    rows = self.embed(ids, lease.device)
                except CudaError as exc:
                    log.warning("device %s failed", lease.device)
                    for j in jobs:
                        j.future.set_exception(exc)
                    lease.close(failed=True)
                    lease = self.devices.lease()  # clean: near miss, closed by the finally; NoDevice leaves the closed one, close() is idempotent
                    continue
                for j, row in zip(jobs, rows):
                    j.future.set_result(row)
        finally:
            lease.close()

    def start_probe(self):
        if self._probe is None:
            self._probe = self.devices.lease()  # leak: shutdown() forgets a probe that was not stopped

    def stop_probe(self, length=128):
        probe, self._probe = self._probe, None
        if probe is None:
            return 0.0
        start = time.perf_counter()
        self.embed([[0] * length], probe.device)
        probe.close()
        return time.perf_counter() - start

    def shutdown(self):
        self._stop.set()
        self.ring.close()
        self._probe = None
        for sid in list(self._streams):
            self.close_stream(sid)
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            item.future.cancel()
            if isinstance(item, Group):
                item.finish(self.ring)
