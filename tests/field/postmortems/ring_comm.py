"""Communication buffers for ring exchange and all-to-all dispatch."""
from __future__ import annotations

import collections


class CommBuffer:
    def __init__(self, bid, capacity):
        self.bid = bid
        self.capacity = capacity
        self.used = 0

    def pack(self, chunk):
        self.used = min(self.capacity, len(chunk))
        return self.used


class BufferRing:
    """Fixed registered buffers; acquire_buffer/release_buffer around every transfer."""

    def __init__(self, n, capacity):
        self._idle = collections.deque(CommBuffer(i, capacity) for i in range(n))
        self._busy = {}

    def acquire_buffer(self):
        if not self._idle:
            return None
        buf = self._idle.popleft()  # clean: recorded as busy and returned
        self._busy[buf.bid] = buf
        return buf

    def release_buffer(self, buf):
        self._busy.pop(buf.bid, None)
        buf.used = 0
        self._idle.append(buf)


class Transport:
    def __init__(self, rank, world):
        self.rank = rank
        self.world = world
        self.inflight = []

    def post_send(self, peer, buf):
        if peer == self.rank:
            return -1
        self.inflight.append((peer, buf.bid))
        return 0

    def post_recv(self, peer, buf):
        return 0 if peer != self.rank else -1

    def wait(self):
        done, self.inflight = self.inflight, []
        return done


class RingExchange:
    def __init__(self, ring, transport):
        self.ring = ring
        self.transport = transport
        self.pending = {}

    def step(self, chunk):
        send = self.ring.acquire_buffer()  # leak: held when no receive buffer is left
        if send is None:
            return None
        recv = self.ring.acquire_buffer()  # clean: released after the wait
        if recv is None:
            return None
        send.pack(chunk)
        nxt = (self.transport.rank + 1) % self.transport.world
        self.transport.post_send(nxt, send)
        self.transport.post_recv(nxt, recv)
        self.transport.wait()
        got = recv.used
        self.ring.release_buffer(send)
        self.ring.release_buffer(recv)
        return got

    def post(self, peer, chunk):
        buf = self.ring.acquire_buffer()  # leak: the error status is counted but the buffer is not released
        if buf is None:
            return False
        buf.pack(chunk)
        rc = self.transport.post_send(peer, buf)
        if rc != 0:
            self.transport.errors = getattr(self.transport, "errors", 0) + 1
            return False
        self.pending.setdefault(peer, []).append(buf)
        return True

    def post_checked(self, peer, chunk):
        buf = self.ring.acquire_buffer()  # clean: near miss, released on the error status, pending otherwise
        if buf is None:
            return False
        buf.pack(chunk)
        if self.transport.post_send(peer, buf):
            self.ring.release_buffer(buf)
            return False
        self.pending.setdefault(peer, []).append(buf)
        return True

    def complete(self, peer):
        for buf in self.pending.pop(peer, ()):
            self.ring.release_buffer(buf)

    def shutdown(self):
        for peer in list(self.pending):
            self.complete(peer)


class AllToAll:
    """Token dispatch: one buffer a peer, kept between dispatch and combine."""

    def __init__(self, ring, transport):
        self.ring = ring
        self.transport = transport
        self.slots = {}

    def dispatch(self, splits):
        for peer, chunk in enumerate(splits):
            buf = self.ring.acquire_buffer()  # leak: empty splits continue without a release
            if buf is None:
                return False
            if not chunk:
                continue
            buf.pack(chunk)
            old = self.slots.pop(peer, None)
            if old is not None:
                self.ring.release_buffer(old)
            self.slots[peer] = buf
        return True

    def redispatch(self, peer, chunk):
        buf = self.ring.acquire_buffer()  # leak: the slot of the first attempt is overwritten on retry
        if buf is None:
            return False
        buf.pack(chunk)
        self.slots[peer] = buf
        return self.transport.post_send(peer, buf) == 0

    def redispatch_into(self, peer, chunk):
        buf = self.slots.get(peer)
        if buf is None:
            buf = self.ring.acquire_buffer()  # clean: near miss, only taken where the slot is empty
            if buf is None:
                return False
            self.slots[peer] = buf
        buf.pack(chunk)
        return self.transport.post_send(peer, buf) == 0

    def combine(self):
        total = 0
        while self.slots:
            _, buf = self.slots.popitem()
            total += buf.used
            self.ring.release_buffer(buf)
        return total


def broadcast(ring, transport, chunk):
    buf = ring.acquire_buffer()  # clean: near miss, the loop may break but the release comes after it
    if buf is None:
        return 0
    sent = 0
    for peer in range(transport.world):
        buf.pack(chunk)
        if transport.post_send(peer, buf) != 0 and peer != transport.rank:
            break
        sent += 1
    ring.release_buffer(buf)
    return sent


def barrier(ring, transport):
    token = ring.acquire_buffer()  # leak: a one-rank world returns at once
    if transport.world == 1 or token is None:
        return
    transport.post_send((transport.rank + 1) % transport.world, token)
    transport.wait()
    ring.release_buffer(token)
