"""Host staging for KV swap: pinned buffers, copy streams, events and the thread that drains them."""
import contextlib
import queue
import threading
import time

import torch


class PinnedBuffers:
    """Size-classed pinned host buffers."""

    CLASSES = (1 << 16, 1 << 20, 1 << 24)

    def __init__(self, per_class=8):
        self._lock = threading.Lock()
        self._free = {c: [torch.empty(c, dtype=torch.uint8) for _ in range(per_class)] for c in self.CLASSES}

    def rent(self, nbytes):
        with self._lock:
            for cls in self.CLASSES:
                if cls >= nbytes and self._free[cls]:
                    return self._free[cls].pop()
        return None

    def rent_exact(self, cls):
        self._lock.acquire()  # leak: the lock stays taken when the size class is unknown
        if cls not in self._free:
            return None
        buf = self._free[cls].pop() if self._free[cls] else None
        self._lock.release()
        return buf

    def restore(self, buf):
        with self._lock:
            self._free[buf.numel()].append(buf)


class StreamPool:
    def __init__(self, n):
        self._q = queue.Queue()
        for _ in range(n):
            self._q.put(torch.cuda.Stream())

    def checkout(self, block=True):
        return self._q.get(block)

    def checkin(self, s):
        self._q.put(s)

    @contextlib.contextmanager
    def scoped(self):
        s = self.checkout()  # clean: checked in in finally
        try:
            with torch.cuda.stream(s):
                yield s
        finally:
            self.checkin(s)


class EventPool:
    def __init__(self):
        self._idle = []

    def obtain(self):
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def recycle(self, ev):
        self._idle.append(ev)


class Transfer:
    def __init__(self, rid, buf, event, on_done=None):
        self.rid = rid
        self.buf = buf
        self.event = event
        self.on_done = on_done


class SwapEngine:
    def __init__(self, bufs, streams, events):
        self.bufs = bufs
        self.streams = streams
        self.events = events
        self.inflight = queue.Queue()
        self.parked = {}
        self._stop = threading.Event()
        self._thread = None

    def start(self):
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    # -- out --------------------------------------------------------------

    def swap_out(self, rid, kv):
        buf = self.bufs.rent(kv.numel())  # clean: travels in the Transfer to the drain thread
        if buf is None:
            return False
        ev = self.events.obtain()  # clean: travels in the Transfer to the drain thread
        with self.streams.scoped() as s:  # clean: the context manager checks it in
            buf[:kv.numel()].copy_(kv, non_blocking=True)
            ev.record(s)
        self.inflight.put(Transfer(rid, buf, ev))
        return True

    def swap_out_checked(self, rid, kv, deadline):
        ev = self.events.obtain()  # leak: not recycled when no buffer is available
        buf = self.bufs.rent(kv.numel())  # clean: in the Transfer, or restored when the deadline has passed
        if buf is None:
            return False
        if time.monotonic() > deadline:
            self.bufs.restore(buf)
            self.events.recycle(ev)
            return False
        buf[:kv.numel()].copy_(kv, non_blocking=True)
        ev.record()
        self.inflight.put(Transfer(rid, buf, ev))
        return True

    # -- in ---------------------------------------------------------------

    def swap_in(self, rid, out):
        got = self.parked.pop(rid, None)
        if got is None:
            return False
        stream = self.streams.checkout()  # leak: not checked in when the parked size differs
        if got.numel() < out.numel():
            return False
        with torch.cuda.stream(stream):
            out.copy_(got[:out.numel()], non_blocking=True)
        stream.synchronize()
        self.streams.checkin(stream)
        return True

    def prefetch(self, rids, shape_of):
        """Stage several parked requests; a generator of (rid, buffer) whose consumer restores each."""
        for rid in rids:
            src = self.parked.get(rid)
            if src is None:
                continue
            buf = self.bufs.rent(shape_of(rid))  # clean: yielded to the consumer, who restores it
            if buf is None:
                return
            buf[:src.numel()].copy_(src)
            yield rid, buf

    def upload_all(self, rids, shape_of, dst):
        n = 0
        for rid, buf in self.prefetch(rids, shape_of):  # clean: each is restored in the body, on both branches
            if rid not in dst:
                self.bufs.restore(buf)
                continue
            dst[rid].copy_(buf[:dst[rid].numel()])
            self.bufs.restore(buf)
            n += 1
        return n

    def upload_first_fit(self, rids, shape_of, dst):
        for rid, buf in self.prefetch(rids, shape_of):  # leak: break on a missing target keeps the yielded buffer
            target = dst.get(rid)
            if target is None:
                break
            target.copy_(buf[:target.numel()])
            self.bufs.restore(buf)

    # -- drain ------------------------------------------------------------

    def _drain(self):
        while not self._stop.is_set():
            try:
                t = self.inflight.get(timeout=0.1)
            except queue.Empty:
                continue
            self._finish(t)

    def _finish(self, t):
        t.event.synchronize()
        self.parked[t.rid] = t.buf.clone()
        self.events.recycle(t.event)
        self.bufs.restore(t.buf)
        if t.on_done is not None:
            t.on_done(t.rid)

    def flush(self):
        while True:
            try:
                t = self.inflight.get_nowait()
            except queue.Empty:
                return
            self._finish(t)

    def benchmark(self, nbytes, rounds):
        """Bandwidth of the host link, in bytes per second."""
        buf = self.bufs.rent(nbytes)  # clean: near miss, restored in finally, which an empty rent never reaches
        if buf is None:
            return 0.0
        stream = None
        try:
            stream = self.streams.checkout(block=False)  # clean: near miss, checked in in finally unless Empty left it None
            dev = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            t0 = time.perf_counter()
            for _ in range(rounds):
                with torch.cuda.stream(stream):
                    dev.copy_(buf[:nbytes], non_blocking=True)
            stream.synchronize()
            return rounds * nbytes / (time.perf_counter() - t0)
        except queue.Empty:
            return 0.0
        finally:
            if stream is not None:
                self.streams.checkin(stream)
            self.bufs.restore(buf)

    def timed_copy(self, dst, src):
        a = self.events.obtain()  # clean: recycled after the elapsed time is read
        b = self.events.obtain()  # leak: only the first event is recycled
        a.record()
        dst.copy_(src, non_blocking=True)
        b.record()
        b.synchronize()
        ms = a.elapsed_time(b)
        self.events.recycle(a)
        return ms

    def stop(self):
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()
