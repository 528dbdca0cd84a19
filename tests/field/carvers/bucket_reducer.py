"""Gradient bucketing on top of a pool of communication buffers."""
import threading
from collections import OrderedDict, defaultdict
from concurrent.futures import Future
from functools import partial

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = dist = None


class CommBuffer:
    def __init__(self, numel):
        self.numel = numel
        self.flat = [0.0] * numel
        self.fill = 0

    def append(self, values):
        end = self.fill + len(values)
        self.flat[self.fill:end] = values
        self.fill = end

    def room(self):
        return self.numel - self.fill


class CommBufferPool:
    def __init__(self, numel, max_buffers=8):
        self.numel = numel
        self.max_buffers = max_buffers
        self._free = []
        self._created = 0
        self._mu = threading.Lock()

    def take(self):
        with self._mu:
            if self._free:
                return self._free.pop()
            if self._created >= self.max_buffers:
                return None
            self._created += 1
            return CommBuffer(self.numel)

    def take_filled(self, values):
        """A buffer already holding `values`, or None when they do not fit."""
        buf = self.take()  # leak: returns None with the buffer in hand when the values do not fit
        if buf is None:
            return None
        if len(values) > buf.room():
            return None
        buf.append(values)
        return buf

    def take_pair(self):
        first = self.take()  # clean: near miss, given back when the second is missing
        second = self.take()  # clean: near miss, given back when the first is missing
        if first is None or second is None:
            for buf in (first, second):
                if buf is not None:
                    self.put(buf)
            return None
        return first, second

    def put(self, buf):
        buf.fill = 0
        with self._mu:
            self._free.append(buf)


class LoopbackGroup:
    """Single-process stand-in for a process group."""

    def __init__(self):
        self.pending = []

    def all_reduce(self, buf):
        fut = Future()
        self.pending.append((fut, buf))
        return fut

    def progress(self):
        pending, self.pending = self.pending, []
        for fut, buf in pending:
            fut.set_result(buf)


class BucketReducer:
    def __init__(self, pool, group, overlap=True):
        self.pool = pool
        self.group = group
        self.overlap = overlap
        self.current = None
        self.inflight = OrderedDict()
        self.grads = defaultdict(list)
        self._seq = 0

    def add(self, name, grad):
        if self.current is not None and self.current.room() < len(grad):
            self.launch()
        if self.current is None:
            self.current = self.pool.take()  # clean: near miss, launched with the bucket or put back by abort
            if self.current is None:
                self.drain()
                self.current = self.pool.take()  # clean: same owner as above
        self.current.append(grad)

    def launch(self):
        buf, self.current = self.current, None
        if buf is None:
            return
        fut = self.group.all_reduce(buf)
        self._seq += 1
        self.inflight[self._seq] = (fut, buf)

    def drain(self):
        self.group.progress()
        while self.inflight:
            seq, (fut, buf) = self.inflight.popitem(last=False)
            self.grads[seq] = list(fut.result().flat[: buf.fill])
            self.pool.put(buf)

    def abort(self):
        if self.current is not None:
            self.pool.put(self.current)
            self.current = None
        for _, buf in self.inflight.values():
            self.pool.put(buf)
        self.inflight.clear()

    def _on_done(self, buf, key, fut):
        try:
            self.grads[key] = list(fut.result().flat[: buf.fill])
        finally:
            self.pool.put(buf)

    def _on_done_norm(self, buf, key, fut):
        total = sum(v * v for v in fut.result().flat[: buf.fill])
        if total == 0.0:
            return
        self.grads[key] = [total ** 0.5]
        self.pool.put(buf)

    def reduce_async(self, key, grad):
        buf = self.pool.take()  # clean: near miss, the done callback puts it back
        if buf is None:
            return None
        buf.append(grad)
        fut = self.group.all_reduce(buf)
        fut.add_done_callback(partial(self._on_done, buf, key))
        return fut

    def norm_async(self, key, grad):
        buf = self.pool.take()  # leak: the callback returns without put for an all-zero gradient
        if buf is None:
            return None
        buf.append(grad)
        fut = self.group.all_reduce(buf)
        fut.add_done_callback(partial(self._on_done_norm, buf, key))
        return fut

    def reduce_lambda(self, key, grad):
        buf = self.pool.take()  # clean: near miss, the lambda puts it back
        if buf is None:
            return False
        buf.append(grad)
        fut = self.group.all_reduce(buf)
        fut.add_done_callback(lambda _f: self.pool.put(buf))
        return True

    def begin_step(self):
        if self.overlap:
            self._shadow = self.pool.take()  # clean: near miss, end_step puts it back under the same flag

    def end_step(self):
        if self.overlap and self._shadow is not None:
            self.pool.put(self._shadow)
            self._shadow = None

    def broadcast_params(self, params):
        sent = 0
        for name, values in params.items():
            buf = self.pool.take_filled(values)  # leak: names that are frozen continue without put
            if buf is None:
                break
            if name.endswith(".frozen"):
                continue
            self.group.all_reduce(buf)
            self.group.progress()
            self.pool.put(buf)
            sent += 1
        return sent

    def exchange(self, outgoing):
        pair = self.pool.take_pair()  # clean: both are put back
        if pair is None:
            return None
        send, recv = pair
        send.append(outgoing)
        recv.append(outgoing)
        result = list(recv.flat[: recv.fill])
        self.pool.put(send)
        self.pool.put(recv)
        return result

    def exchange_head(self, outgoing):
        pair = self.pool.take_pair()  # leak: only the sending half is put back
        if pair is None:
            return None
        send, recv = pair
        send.append(outgoing[:1])
        recv.append(outgoing[:1])
        head = recv.flat[0]
        self.pool.put(send)
        return head


def sync_scalars(reducer, scalars):
    pool = reducer.pool
    works = []
    for value in scalars:
        buf = pool.take()  # clean: near miss, kept in works and put back by the second loop
        if buf is None:
            break
        buf.append([value])
        works.append((reducer.group.all_reduce(buf), buf))
    reducer.group.progress()
    out = []
    for fut, buf in works:
        out.append(fut.result().flat[0])
        pool.put(buf)
    return out
