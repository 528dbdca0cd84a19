"""Exchange primitives of the parallel layers, on top of registered buffers."""
from __future__ import annotations

import logging

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class BuffersExhausted(RuntimeError):
    pass


class CommBuffers:
    def __init__(self, numel, count, device="cuda"):
        self._idle = [torch.empty(numel, device=device, dtype=torch.bfloat16) for _ in range(count)]

    def acquire(self):
        if not self._idle:
            raise BuffersExhausted
        return self._idle.pop()

    def release(self, buf):
        self._idle.append(buf)


class RingExchanger:
    def __init__(self, buffers, group):
        self.group = group
        self.buffers = buffers
        self.send = buffers.acquire()  # clean: near miss, the two fields only swap places, close releases both
        self.recv = buffers.acquire()  # clean: near miss, the two fields only swap places, close releases both

    def rotate(self, left, right):
        ops = [dist.P2POp(dist.isend, self.send, right, self.group),
               dist.P2POp(dist.irecv, self.recv, left, self.group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.send, self.recv = self.recv, self.send
        return self.send

    def close(self):
        self.buffers.release(self.send)
        self.buffers.release(self.recv)


class PeerGather:
    def __init__(self, buffers, peers):
        self.buffers = buffers
        self.peers = peers
        self.posted = {}

    def post(self):
        for peer in self.peers:
            buf = self.buffers.acquire()  # leak: wait_all stops at the first failed peer and clears the rest
            self.posted[peer] = (buf, dist.irecv(buf, peer))

    def wait_all(self, consume):
        ok = True
        for peer, (buf, work) in self.posted.items():
            try:
                work.wait()
            except RuntimeError:
                log.warning("peer %d failed", peer)
                self.buffers.release(buf)
                ok = False
                break
            consume(peer, buf)
            self.buffers.release(buf)
        self.posted.clear()
        return ok


class GradBucketer:
    def __init__(self, buffers, capacity):
        self.buffers = buffers
        self.capacity = capacity
        self.bucket = buffers.acquire()  # clean: near miss, moved to inflight before the field is refilled, close releases the last
        self.used = 0
        self.inflight = []

    def add(self, grad):
        if self.used + grad.numel() > self.capacity:
            self.flush()
        self.bucket[self.used:self.used + grad.numel()].copy_(grad.flatten())
        self.used += grad.numel()

    def flush(self):
        work = dist.all_reduce(self.bucket[:self.used], async_op=True)
        self.inflight.append((self.bucket, work))
        self.bucket = self.buffers.acquire()  # clean: near miss, moved to inflight before the field is refilled, close releases the last
        self.used = 0

    def finish_step(self):
        if self.used:
            self.flush()
        for buf, work in self.inflight:
            work.wait()
            self.buffers.release(buf)
        self.inflight.clear()

    def close(self):
        self.buffers.release(self.bucket)
        self.bucket = None


class ExpertDispatch:
    def __init__(self, buffers):
        self.buffers = buffers
        self.current = None

    def dispatch(self, tokens, splits):
        send = self.buffers.acquire()  # leak: a step without tokens returns before the pair is stored
        if tokens.numel() == 0:
            dist.barrier()
            return None
        recv = self.buffers.acquire()  # clean: stored with the pair, combine releases both
        send[:tokens.numel()].copy_(tokens.flatten())
        dist.all_to_all_single(recv, send, splits, splits)
        self.current = (send, recv)
        return recv

    def combine(self):
        if self.current is None:
            return
        for buf in self.current:
            self.buffers.release(buf)
        self.current = None


class HaloExchanger:
    def __init__(self, buffers, rank, world):
        self.buffers = buffers
        self.rank = rank
        self.world = world
        self.left = None
        self.right = None

    def post(self):
        if self.rank > 0:
            self.left = self.buffers.acquire()  # clean: complete releases it and empties the field
            dist.irecv(self.left, self.rank - 1)
        if self.rank < self.world - 1:
            self.right = self.buffers.acquire()  # leak: the first rank has no left neighbour and complete returns early
            dist.irecv(self.right, self.rank + 1)

    def complete(self, apply):
        if self.left is None:
            return
        apply(self.left, -1)
        self.buffers.release(self.left)
        self.left = None
        if self.right is not None:
            apply(self.right, 1)
            self.buffers.release(self.right)
            self.right = None


class StageStash:
    """Activations that a pipeline stage keeps between forward and backward."""

    def __init__(self, buffers, stage):
        self.buffers = buffers
        self.stage = stage
        self.stash = {}

    def forward(self, micro, x, training):
        buf = self.buffers.acquire()  # leak: in evaluation no backward comes that would take the micro batch out again
        buf[:x.numel()].copy_(x.flatten())
        self.stash[micro] = buf
        with torch.set_grad_enabled(training):
            return self.stage(x)

    def backward(self, micro, grad):
        buf = self.stash.pop(micro)
        out = self.stage.backward(buf, grad)
        self.buffers.release(buf)
        return out


class ElasticGroup:
    def __init__(self, buffers):
        self.buffers = buffers
        self.by_peer = {}

    def buffer_for(self, peer):
        if peer not in self.by_peer:
            self.by_peer[peer] = self.buffers.acquire()  # leak: a membership change rebuilds the table with the buffers of the survivors only
        return self.by_peer[peer]

    def on_membership(self, alive):
        self.by_peer = {p: b for p, b in self.by_peer.items() if p in alive}

    def close(self):
        for buf in self.by_peer.values():
            self.buffers.release(buf)
        self.by_peer.clear()
