# Activation buffers and the 1F1B loop of one pipeline stage.
import torch
import torch.distributed as dist


class Empty(Exception): ...

class ActPool:
    """Buffers of one shape.  get/recycle; a buffer knows its micro-batch."""

    def __init__(self, shape, dtype, n, dev="cuda"):
        self.mk = lambda: torch.empty(shape, dtype=dtype, device=dev)
        self.free = [self.mk() for _ in range(n)]
        self.n = n

    def get(self):
        if not self.free:
            raise Empty(self.n)
        return self.free.pop()  # clean: returned

    def peek_get(self):
        return self.free.pop() if self.free else None  # clean: returned or None

    def recycle(self, t):
        t.grad = None
        self.free.append(t.detach())

    def scrub(self):
        """Zero every free buffer, between two evaluations."""
        for _ in range(len(self.free)):
            t = self.free.pop(0)  # clean: near miss, appended at the other end again
            t.zero_()
            self.free.append(t)

    def split(self, k):
        """Move k buffers into a pool of their own, for the second virtual stage."""
        got = []
        for _ in range(k):
            if not self.free:
                return None
            got.append(self.free.pop())  # leak: when the pool runs dry before k the return drops what is in got
        other = ActPool.__new__(ActPool)
        other.mk, other.free, other.n = self.mk, got, k
        self.n -= k
        return other


class Xfer:
    """A send or a receive under way, with its buffer."""

    def __init__(self, pool, buf, work, mb):
        self.pool, self.buf, self.work, self.mb = pool, buf, work, mb

    def ready(self):
        return self.work is None or self.work.is_completed()

    def wait(self):
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.buf

    def done(self):
        if self.buf is not None:
            self.pool.recycle(self.buf)
            self.buf = None


class Link:
    """One direction between two neighbouring stages."""

    def __init__(self, pool, peer, group, depth=2):
        self.pool, self.peer, self.group, self.depth = pool, peer, group, depth
        self.inflight = []
        self.posted = {}

    def post_recv(self, mb):
        buf = self.pool.get()  # leak: posting a micro-batch twice replaces the Xfer in posted
        work = dist.irecv(buf, self.peer, group=self.group)
        self.posted[mb] = Xfer(self.pool, buf, work, mb)

    def take(self, mb):
        """The received Xfer; the caller calls done()."""
        if mb not in self.posted:
            self.post_recv(mb)
        x = self.posted.pop(mb)
        x.wait()
        return x

    def send(self, t, mb):
        self.sweep()
        if self.peer is None:
            return
        buf = self.pool.get()  # clean: goes into inflight and sweep() or drain() recycle it
        buf.copy_(t)
        self.inflight.append(Xfer(self.pool, buf, dist.isend(buf, self.peer, group=self.group), mb))

    def send_small(self, t, mb):
        buf = self.pool.peek_get()  # clean: near miss, a None means a direct send, else it is in inflight
        if buf is None:
            dist.send(t, self.peer, group=self.group)
            return
        buf.copy_(t)
        self.inflight.append(Xfer(self.pool, buf, dist.isend(buf, self.peer, group=self.group), mb))

    def send_checked(self, t, mb):
        buf = self.pool.get()  # leak: the ValueError about the shape is raised with the buffer in hand
        if buf.shape != t.shape:
            raise ValueError(f"micro-batch {mb}: {tuple(t.shape)} into {tuple(buf.shape)}")
        buf.copy_(t)
        self.inflight.append(Xfer(self.pool, buf, dist.isend(buf, self.peer, group=self.group), mb))

    def sweep(self):
        busy = []
        for x in self.inflight:
            if x.ready():
                x.done()
            else:
                busy.append(x)
        self.inflight = busy
        while len(self.inflight) > self.depth:
            x = self.inflight.pop(0)
            x.wait()
            x.done()

    def drain(self):
        for x in self.inflight:
            x.wait()
            x.done()
        self.inflight.clear()
        for x in self.posted.values():
            x.wait()
            x.done()
        self.posted.clear()


class Stage:
    def __init__(self, mod, rx, tx, grx, gtx, pool, last):
        self.mod, self.rx, self.tx, self.grx, self.gtx = mod, rx, tx, grx, gtx
        self.pool = pool
        self.last = last
        self.saved = {}
        self.losses = []

    def forward(self, mb, x=None, target=None):
        src = None
        if x is None:
            src = self.rx.take(mb)  # clean: near miss, in saved before anything can go wrong, backward(), skip() or clear() call done()
            x = src.buf.requires_grad_()
        self.saved[mb] = (src, x, None)
        y = self.mod(x)
        if self.last:
            y = torch.nn.functional.cross_entropy(y.flatten(0, 1), target.flatten())
            self.losses.append(float(y))
        else:
            self.tx.send(y.detach(), mb)
        self.saved[mb] = (src, x, y)  # with the output now

    def forward_only(self, mb, x=None):
        """Evaluation."""
        src = None
        if x is None:
            src = self.rx.take(mb)  # leak: the last stage returns the logits before done()
            x = src.buf
        with torch.no_grad():
            y = self.mod(x)
        if self.last:
            return y
        self.tx.send(y, mb)
        if src is not None:
            src.done()

    def backward(self, mb):
        src, x, y = self.saved[mb]
        if self.last:
            y.backward()
        else:
            g = self.grx.take(mb)  # clean: done() follows the backward
            y.backward(g.buf)
            g.done()
        if src is not None:
            self.gtx.send(x.grad, mb)
            src.done()
        del self.saved[mb]

    def skip(self, mb):
        """Drop a micro-batch whose loss was not finite."""
        src, x, y = self.saved[mb]
        if src is not None:
            self.gtx.send(torch.zeros_like(x), mb)
            src.done()
        del self.saved[mb]

    def clear(self):
        for src, _, _ in self.saved.values():
            if src is not None:
                src.done()
        self.saved.clear()
        for link in (self.rx, self.tx, self.grx, self.gtx):
            if link is not None:
                link.drain()


def run_1f1b(st, rank, world, nmb, batches, targets):
    warm = min(world - rank - 1, nmb)
    try:
        for mb in range(warm):
            st.forward(mb, batches and batches[mb], targets and targets[mb])
        for mb in range(warm, nmb):
            st.forward(mb, batches and batches[mb], targets and targets[mb])
            b = mb - warm
            if st.losses and st.losses[-1] != st.losses[-1]:
                st.skip(b)
            else:
                st.backward(b)
        for b in range(nmb - warm, nmb):
            st.backward(b)
    finally:
        st.clear()
    return st.losses


def ring_average(pool, t, rank, world, group=None):
    """Average over the ring with two buffers; None when the pool cannot give them."""
    try:
        a = pool.get()  # leak: Empty from the second get is caught and a is not recycled
        b = pool.get()  # clean: recycled after the rounds
    except Empty:
        return None
    a.copy_(t)
    acc = t.clone()
    for _ in range(world - 1):
        w = dist.isend(a, (rank + 1) % world, group=group)
        dist.recv(b, (rank - 1) % world, group=group)
        w.wait()
        acc += b
        a, b = b, a
    pool.recycle(a)
    pool.recycle(b)
    return acc / world


def probe_latency(pool, peer, reps=10):
    ts = []
    t = pool.peek_get()  # clean: both ways out of the branch recycle it
    if t is None:
        return ts
    for _ in range(reps):
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record()
        dist.send(t, peer)
        dist.recv(t, peer)
        e.record()
        e.synchronize()
        ts.append(s.elapsed_time(e))
        if ts[-1] > 1000:
            pool.recycle(t)
            return ts[:-1]
    pool.recycle(t)
    return ts
