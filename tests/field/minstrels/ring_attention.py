"""Ring attention over a sequence-parallel group.

Every rank owns one slice of the sequence. K and V travel around the ring in packed buffers of
shape (2, heads, slice, dim). The buffers come from a small fixed set so that memory stays flat
over the whole model; a layer borrows what it needs and hands it back when its step is done.
"""
import logging
import math
import queue
import threading
import time

import torch
import torch.distributed as dist

log = logging.getLogger("ring")


class RingTimeout(RuntimeError):
    pass


class PackedBuffers:
    def __init__(self, shape, dtype, device, count):
        self.shape = tuple(shape)
        self._free = [torch.empty(self.shape, dtype=dtype, device=device) for _ in range(count)]
        self._cond = threading.Condition()
        self.out = 0
        self.peak = 0

    def take(self):
        with self._cond:
            while not self._free:
                self._cond.wait()
            buf = self._free.pop()  # clean: handed to the caller
            self.out += 1
            self.peak = max(self.peak, self.out)
            return buf

    def take_within(self, seconds):
        deadline = time.monotonic() + seconds
        with self._cond:
            while not self._free:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RingTimeout("no packed buffer after %.1fs (%d out)" % (seconds, self.out))
                self._cond.wait(left)
            self.out += 1
            return self._free.pop()  # clean: handed to the caller

    def take_pair(self):
        """Two buffers at once for the double-buffered schedule, or None; never waits."""
        with self._cond:
            if not self._free:
                return None
            first = self._free.pop()  # leak: with only one buffer free it is popped and not put back
            if not self._free:
                log.debug("pair wanted, only one buffer free (%d out)", self.out)
                return None
            second = self._free.pop()  # clean: handed to the caller with the first
            self.out += 2
            self.peak = max(self.peak, self.out)
        return first, second

    def give(self, buf):
        with self._cond:
            self.out -= 1
            self._free.append(buf)
            self._cond.notify()


class RingComm:
    def __init__(self, group):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self._reqs = []

    def start(self, send, recv):
        nxt = (self.rank + 1) % self.world
        prv = (self.rank - 1) % self.world
        ops = [dist.P2POp(dist.isend, send, nxt, self.group), dist.P2POp(dist.irecv, recv, prv, self.group)]
        self._reqs = dist.batch_isend_irecv(ops)

    def finish(self):
        for r in self._reqs:
            r.wait()
        self._reqs.clear()


def pack_kv(k, v, out):
    out[0].copy_(k)
    out[1].copy_(v)


def block_attention(q, k, v, scale, causal_mask):
    s = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal_mask is not None:
        s = s.masked_fill(causal_mask, float("-inf"))
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    return torch.matmul(torch.exp(s - lse), v), lse


def merge(acc, lse, out, block_lse):
    if acc is None:
        return out, block_lse
    new = torch.logaddexp(lse, block_lse)
    return acc * torch.exp(lse - new) + out * torch.exp(block_lse - new), new


def ring_forward(comm, pool, q, k, v, causal):
    scale = 1.0 / math.sqrt(q.shape[-1])
    acc = lse = None
    cur = pool.take()  # clean: near miss, given back when the ring moves on, the last cur after the loop
    pack_kv(k, v, cur)
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = pool.take()  # clean: near miss, becomes cur at the end of the step and is given back as cur
            comm.start(cur, nxt)
        src = (comm.rank - step) % comm.world
        if not causal or src <= comm.rank:
            n = q.shape[-2]
            mask = torch.ones(n, n, dtype=torch.bool).triu_(1) if causal and src == comm.rank else None
            out, block_lse = block_attention(q, cur[0], cur[1], scale, mask)
            acc, lse = merge(acc, lse, out, block_lse)
        if nxt is not None:
            comm.finish()
            pool.give(cur)
            cur = nxt
    pool.give(cur)
    return acc, lse


def ring_recompute(comm, pool, q, packed, causal, visit):
    """Second trip around the ring for the backward. `visit` gets every foreign block once."""
    if comm.world == 1:
        return 0
    visited = 0
    held = pool.take()  # leak: on a step that the causal mask skips, held is rebound to nxt
    comm.start(packed, held)
    comm.finish()
    for step in range(1, comm.world):
        src = (comm.rank - step) % comm.world
        nxt = pool.take() if step + 1 < comm.world else None  # leak: becomes held and is lost on the next skipped step
        if nxt is not None:
            comm.start(held, nxt)
            comm.finish()
        if causal and src > comm.rank:
            held = nxt
            continue
        visit(src, held[0], held[1])
        visited += 1
        pool.give(held)
        held = nxt
    return visited


class CommThread(threading.Thread):
    """Runs exchanges off the compute thread. done(recv) is called when a block has arrived."""

    def __init__(self, comm):
        super().__init__(daemon=True)
        self.comm = comm
        self.jobs = queue.Queue()
        self.failed = None

    def submit(self, send, recv, done):
        self.jobs.put((send, recv, done))

    def run(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            send, recv, done = job
            try:
                self.comm.start(send, recv)
                self.comm.finish()
            except RuntimeError as e:
                log.error("exchange failed: %s", e)
                self.failed = e
                continue
            done(recv)


def prefetch_block(thread, pool, packed, sink):
    buf = pool.take()  # leak: the comm thread does not call done when the exchange fails
    thread.submit(packed, buf, sink.arrived)


class Sink:
    def __init__(self, pool):
        self.pool = pool
        self.blocks = queue.Queue()

    def arrived(self, buf):
        self.blocks.put(buf)

    def consume(self, fn):
        buf = self.blocks.get()
        try:
            return fn(buf[0], buf[1])
        finally:
            self.pool.give(buf)


class RingLayerState:
    def __init__(self, pool, k, v):
        self.pool = pool
        self.saved = pool.take()  # clean: near miss, stored on self and given back in drop()
        pack_kv(k, v, self.saved)

    def drop(self):
        if self.saved is not None:
            self.pool.give(self.saved)
            self.saved = None


def layer_step(comm, pool, q, k, v, causal, budget_s=5.0):
    state = RingLayerState(pool, k, v)  # clean: dropped in the outer finally
    try:
        out, lse = ring_forward(comm, pool, q, k, v, causal)
        try:
            scratch = pool.take_within(budget_s)  # clean: given back in the inner finally
        except RingTimeout:
            log.warning("no scratch for the entropy probe, skipped")
            return out, lse, None
        try:
            scratch[0].copy_(out)
            probe = float(scratch[0].float().pow(2).mean())
        finally:
            pool.give(scratch)
        return out, lse, probe
    finally:
        state.drop()


def warm_up(comm, pool, rounds):
    for i in range(rounds):
        pair = pool.take_pair()  # clean: both are given back below, None is skipped
        if pair is None:
            continue
        a, b = pair
        comm.start(a, b)
        comm.finish()
        pool.give(a)
        pool.give(b)


def bench_link(comm, pool, seconds):
    a = pool.take_within(seconds)  # leak: stays out when the second take_within times out
    b = pool.take_within(seconds)  # clean: given back after the measurement
    t0 = time.time()
    comm.start(a, b)
    comm.finish()
    dt = time.time() - t0
    pool.give(a)
    pool.give(b)
    return a.numel() * a.element_size() / max(dt, 1e-9)
