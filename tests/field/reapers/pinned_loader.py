"""Pinned staging buffers between decoder threads and the device copy stream."""
import contextlib
import queue
import threading
import time

import torch

class PoolClosed(Exception): pass
class BufferTooSmall(Exception): pass
class DecodeError(Exception): pass


class StagingBuffer:
    def __init__(self, nbytes):
        self.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.length = 0

    def view(self):
        return self.storage[: self.length]


class StagingPool:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._cond = threading.Condition()
        self._idle = [StagingBuffer(nbytes) for _ in range(count)]
        self._closed = False

    def checkout(self, nbytes, timeout=None):
        """Wait for an idle buffer; None when the timeout passes first."""
        with self._cond:
            ok = self._cond.wait_for(lambda: self._idle or self._closed, timeout)
            if self._closed:
                raise PoolClosed
            if not ok:
                return None
            buf = self._idle.pop()  # leak: an oversized request raises after the pop
        if buf.storage.numel() < nbytes:
            raise BufferTooSmall(f"{nbytes} > {self.nbytes}")
        buf.length = nbytes
        return buf

    def poll(self):
        """Non-blocking checkout of a full-size buffer."""
        with self._cond:
            if self._closed or not self._idle:
                return None
            buf = self._idle.pop()  # clean: returned at full length
            buf.length = self.nbytes
            return buf

    def checkin(self, buf):
        with self._cond:
            buf.length = 0
            self._idle.append(buf)
            self._cond.notify()

    @contextlib.contextmanager
    def borrowed(self, nbytes):
        buf = self.checkout(nbytes)  # clean: given back in finally
        try:
            yield buf
        finally:
            self.checkin(buf)

    def close(self):
        with self._cond:
            self._closed = True
            self._cond.notify_all()


class DeferredReturns:
    def __init__(self, pool):
        self.pool = pool
        self._pending = []

    def push(self, event, buf):
        self._pending.append((event, buf))

    def poll(self):
        waiting = []
        for event, buf in self._pending:
            if event.query():
                self.pool.checkin(buf)
            else:
                waiting.append((event, buf))
        self._pending = waiting

    def drain(self):
        for event, buf in self._pending:
            event.synchronize()
            self.pool.checkin(buf)
        self._pending = []


class Reader(threading.Thread):
    def __init__(self, pool, decode, indices, done, max_bytes):
        super().__init__(daemon=True)
        self.pool, self.decode = pool, decode
        self.indices, self.done = indices, done
        self.max_bytes = min(max_bytes, pool.nbytes)
        self.bad = 0

    def run(self):
        try:
            while True:
                idx = self.indices.get()
                if idx is None:
                    return
                buf = self.pool.checkout(self.max_bytes)  # leak: a sample that fails to decode is reported without its buffer
                try:
                    buf.length = self.decode(idx, buf.storage)
                except DecodeError:
                    self.bad += 1
                    self.done.put((idx, None))
                    continue
                self.done.put((idx, buf))
        except PoolClosed:
            return


class StreamCopier:
    """Takes host buffers in any order, yields device tensors in index order."""

    def __init__(self, pool, done, device):
        self.pool, self.done = pool, done
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.deferred = DeferredReturns(pool)

    def __call__(self, total):
        parked, want = {}, 0
        try:
            while want < total:
                while want not in parked:
                    idx, buf = self.done.get()
                    parked[idx] = buf
                buf = parked.pop(want)
                want += 1
                if buf is None:
                    continue
                yield self._send(buf, buf.length)
                self.deferred.poll()
        finally:
            self.deferred.drain()
            for buf in parked.values():
                if buf is not None:
                    self.pool.checkin(buf)

    def send_header(self, header):
        buf = self.pool.poll()  # clean: near miss, pushed with its event and returned by poll() or drain()
        if buf is None:
            return header.to(self.device)
        buf.storage[: header.numel()].copy_(header)
        return self._send(buf, header.numel())

    def _send(self, buf, n):
        with torch.cuda.stream(self.stream):
            out = buf.storage[:n].to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.deferred.push(event, buf)
        return out


class EvalPrefetcher:
    def __init__(self, pool, dataset):
        self.pool = pool
        self.dataset = dataset
        self._ahead = None
        self.rewind()

    def rewind(self):
        self._it = iter(self.dataset)
        self._fill()

    def _fill(self):
        sample = next(self._it, None)
        if sample is None:
            self._ahead = None
            return
        self._ahead = self.pool.poll()  # leak: rewind() in the middle of an epoch overwrites the buffer that was filled ahead
        if self._ahead is not None:
            self._ahead.storage[: sample.numel()].copy_(sample)
            self._ahead.length = sample.numel()

    def __next__(self):
        current = self._ahead
        if current is None:
            raise StopIteration
        host = current.view().clone()
        self.pool.checkin(current)
        self._fill()
        return host


def mix_pair(pool, left, right, alpha):
    """Mixup of two raw samples in staging memory; None when the pool is dry."""
    a = pool.poll()  # leak: the return for a missing second buffer keeps the first
    if a is None:
        return None
    b = pool.poll()  # clean: both go back in finally
    if b is None:
        return None
    try:
        n = min(left.numel(), right.numel())
        a.storage[:n].copy_(left[:n])
        b.storage[:n].copy_(right[:n])
        mixed = a.storage[:n].float() * alpha + b.storage[:n].float() * (1 - alpha)
        return mixed.to(torch.uint8)
    finally:
        pool.checkin(a)
        pool.checkin(b)


def probe(pool, device, rounds=8):
    best = 0.0
    for _ in range(rounds):
        buf = pool.poll()  # clean: checked in at the end of the round
        if buf is None:
            break
        t0 = time.perf_counter()
        buf.storage.to(device)
        best = max(best, pool.nbytes / (time.perf_counter() - t0))
        pool.checkin(buf)
    with pool.borrowed(1) as tiny:  # clean: the context manager gives it back
        tiny.storage[:1].to(device)
    return best


def copy_or_keep(pool, sample, sink):
    """Stage a sample; the sink may take the buffer over by returning True."""
    buf = pool.checkout(sample.numel())  # clean: near miss, either the sink checks it in or the flag does it here
    taken = False
    try:
        buf.storage[: sample.numel()].copy_(sample)
        taken = sink.offer(buf)
    finally:
        if not taken:
            pool.checkin(buf)


class BoundedSink:
    def __init__(self, pool, limit):
        self.pool, self.q = pool, queue.Queue(limit)

    def offer(self, buf):
        try:
            self.q.put_nowait(buf)
        except queue.Full:
            return False
        return True

    def drain(self):
        while not self.q.empty():
            buf = self.q.get_nowait()
            host = buf.view().clone()
            self.pool.checkin(buf)
            yield host
