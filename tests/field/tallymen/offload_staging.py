"""Moves layer activations and weights through pinned staging buffers."""
import logging
import queue
import threading
from collections import deque

import torch

log = logging.getLogger("offload")


class StagingTimeout(RuntimeError):
    pass


class EventsExhausted(RuntimeError):
    pass


class LayerMissing(KeyError):
    pass


class HostBuffer:
    def __init__(self, index, nbytes):
        self.index = index
        self.nbytes = nbytes
        self.mem = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.busy = False

    def view_as(self, t):
        n = t.numel() * t.element_size()
        return self.mem[:n].view(t.dtype).view(t.shape)


class StagingRing:
    def __init__(self, count, nbytes):
        self.nbytes = nbytes
        self._free = queue.Queue()
        for i in range(count):
            self._free.put(HostBuffer(i, nbytes))

    def rent(self, timeout=1.0):
        try:
            buf = self._free.get(timeout=timeout)  # clean: handed to the caller
        except queue.Empty:
            raise StagingTimeout(f"no buffer of {self.nbytes} bytes") from None
        buf.busy = True
        return buf

    def settle(self, buf):
        if not buf.busy:
            raise AssertionError(f"buffer {buf.index} settled twice")
        buf.busy = False
        self._free.put(buf)


class EventPool:
    def __init__(self, limit):
        self.limit = limit
        self.made = 0
        self._spare = []

    def get(self):
        if self._spare:
            return self._spare.pop()  # clean: handed to the caller
        if self.made >= self.limit:
            raise EventsExhausted(str(self.limit))
        self.made += 1
        return torch.cuda.Event()  # clean: handed to the caller

    def put(self, ev):
        self._spare.append(ev)


class Op:
    __slots__ = ("kind", "layer", "buf", "ev", "dst")

    def __init__(self, kind, layer, buf, ev, dst=None):
        self.kind, self.layer, self.buf, self.ev, self.dst = kind, layer, buf, ev, dst


class HostStore:
    def __init__(self):
        self._data = {}

    def write(self, layer, mem):
        self._data[layer] = mem.clone()

    def read(self, layer, mem):
        if layer not in self._data:
            raise LayerMissing(layer)
        src = self._data[layer]
        mem[: src.numel()].copy_(src)
        return src.numel()


class OffloadEngine:
    def __init__(self, ring, big_ring, events, store, stream=None):
        self.ring = ring
        self.big_ring = big_ring
        self.events = events
        self.store = store
        self.stream = stream or torch.cuda.Stream()
        self._inflight = deque()

    def push(self, layer, tensor):
        buf = self.ring.rent()  # leak: when the events are exhausted get() raises and the buffer is in no list
        ev = self.events.get()  # clean: rides in the op, poll() puts it back
        with torch.cuda.stream(self.stream):
            buf.view_as(tensor).copy_(tensor, non_blocking=True)
            ev.record()
        self._inflight.append(Op("d2h", layer, buf, ev))

    def pull(self, layer, dst):
        """Host to device. False when it should be tried later."""
        try:
            ev = self.events.get()  # leak: poll() puts back the events of d2h copies only
        except EventsExhausted:
            self.poll()
            return False
        try:
            buf = self.ring.rent(timeout=0.2)  # clean: near miss, rides in the op or is settled in the handler
        except StagingTimeout:
            self.events.put(ev)
            return False
        try:
            self.store.read(layer, buf.mem)
        except LayerMissing:
            self.ring.settle(buf)
            self.events.put(ev)
            raise
        with torch.cuda.stream(self.stream):
            dst.copy_(buf.view_as(dst), non_blocking=True)
            ev.record()
        self._inflight.append(Op("h2d", layer, buf, ev, dst))
        return True

    def poll(self):
        done = 0
        while self._inflight and self._inflight[0].ev.query():
            op = self._inflight.popleft()
            if op.kind == "d2h":
                self.store.write(op.layer, op.buf.mem)
                self.ring.settle(op.buf)
                self.events.put(op.ev)
            else:
                self.ring.settle(op.buf)
            done += 1
        return done

    def reshard(self, layer, shards):
        for i, shard in enumerate(shards):
            need = shard.numel() * shard.element_size()
            ring = self.ring
            buf = ring.rent(timeout=None)  # leak: rebound below for a shard that is too large for it
            if need > buf.nbytes:
                ring = self.big_ring
                buf = ring.rent(timeout=None)  # clean: near miss, settled to the ring it came from
            try:
                buf.view_as(shard).copy_(shard)
                self.store.write(f"{layer}.{i}", buf.mem)
            finally:
                ring.settle(buf)

    def snapshot(self, tensors):
        """All tensors of a step at once, or none."""
        held = []
        try:
            for t in tensors:
                buf = self.ring.rent(timeout=0.1)  # clean: near miss, a timeout midway still settles the ones in the list
                held.append(buf)
                buf.view_as(t).copy_(t)
            for i, buf in enumerate(held):
                self.store.write(f"snap.{i}", buf.mem)
        except StagingTimeout:
            log.warning("snapshot skipped after %d buffers", len(held))
            return False
        finally:
            for buf in held:
                self.ring.settle(buf)
        return True


class LayerWindow:
    """Keeps one layer in host memory; moves along the model."""

    def __init__(self, ring, store):
        self.ring = ring
        self.store = store
        self.buf = None

    def move_to(self, layer):
        self.close()
        self.buf = self.ring.rent()  # clean: near miss, the previous one is settled by close() first
        try:
            self.store.read(layer, self.buf.mem)
        except LayerMissing:
            log.info("window on %s is empty", layer)

    def close(self):
        if self.buf is not None:
            self.ring.settle(self.buf)
            self.buf = None


class WriteBehind:
    """One thread that writes tensors to the store."""

    def __init__(self, ring, store):
        self.ring = ring
        self.store = store
        self._jobs = queue.Queue()
        self._dropped = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, layer, tensor):
        buf = self.ring.rent()  # leak: the thread skips the jobs of dropped layers without settling
        buf.view_as(tensor).copy_(tensor)
        self._jobs.put((layer, buf))

    def drop(self, layer):
        self._dropped.add(layer)

    def _run(self):
        while True:
            job = self._jobs.get()
            if job is None:
                return
            layer, buf = job
            if layer in self._dropped:
                continue
            self.store.write(layer, buf.mem)
            self.ring.settle(buf)

    def stop(self):
        self._jobs.put(None)
        self._thread.join()


def stream_layers(ring, store, layers):
    """Yields (layer, buffer), reading one ahead."""
    ahead = None
    cur = None
    try:
        for layer in layers:
            nxt = ring.rent(timeout=None)  # clean: near miss, becomes ahead, then cur, and both are settled in the finally
            ahead, cur = nxt, ahead
            store.read(layer, nxt.mem)
            if cur is not None:
                yield layer - 1, cur
                ring.settle(cur)
                cur = None
        if ahead is not None:
            yield layers[-1], ahead
    finally:
        for buf in (cur, ahead):
            if buf is not None:
                ring.settle(buf)
