# 1F1B pipeline stage: activation stash, receive slots, and the loop that runs them.
import collections
import itertools
import os
import sys
import time

import torch
import torch.distributed as dist

F, B, IDLE = "F", "B", "-"
VERBOSE = int(os.environ.get("PIPE_VERBOSE", "0"))


def say(*a):
    if VERBOSE:
        print("[pipe %d]" % dist.get_rank(), *a, file=sys.stderr)


class Bubble(Exception):
    """A microbatch that cannot go on (peer gone, shapes differ)."""


class Stash:
    """Fixed number of activation slots; tensors are allocated once at the shape of a microbatch."""

    def __init__(self, n, shape, dev):
        self.t = [torch.empty(shape, device=dev) for _ in range(n)]
        self.free = collections.deque(range(n))
        self.owner = [None] * n

    def take(self, who):
        if not self.free:
            return -1
        i = self.free.popleft()  # clean: index goes to the caller
        self.owner[i] = who
        return i

    def must(self, who):
        i = self.take(who)  # clean: returned, or -1
        if i < 0:
            raise Bubble("stash full for %s: %s" % (who, self.owner))
        return i

    def drop(self, i):
        assert self.owner[i] is not None
        self.owner[i] = None
        self.free.append(i)

    def fill(self, i, x):
        if x.shape != self.t[i].shape:
            raise Bubble("slot %d: %s" % (i, tuple(x.shape)))
        self.t[i].copy_(x)

    def move(self, i, who):
        self.owner[i] = who
        return i


class Wire:
    """Point to point traffic with one neighbour."""

    def __init__(self, peer, stash):
        self.peer = peer
        self.stash = stash
        self.inflight = collections.deque()

    def post(self, mb):
        i = self.stash.take(("recv", mb))  # clean: near miss, stays in inflight till wait() or cancel() takes it out
        if i < 0:
            return False
        self.inflight.append((mb, i, dist.irecv(self.stash.t[i], self.peer)))
        return True

    def wait(self):
        mb, i, req = self.inflight.popleft()
        req.wait()
        return mb, i

    def cancel(self):
        for mb, i, req in self.inflight:
            req.wait()
            self.stash.drop(i)
        self.inflight.clear()

    def send(self, t):
        dist.isend(t, self.peer).wait()


def order(stage, stages, m):
    """The 1F1B order of one stage as a list of (kind, microbatch)."""
    warm = min(stages - stage - 1, m)
    f, b = itertools.count(), itertools.count()
    out = [(F, next(f)) for _ in range(warm)]
    for _ in range(m - warm):
        out += [(F, next(f)), (B, next(b))]
    out += [(B, next(b)) for _ in range(warm)]
    return out


class Stage:
    def __init__(self, mod, idx, n, shape, dev, slots):
        self.mod, self.idx, self.n = mod, idx, n
        self.stash = Stash(slots, shape, dev)
        self.up = Wire(idx - 1, self.stash) if idx > 0 else None
        self.down = Wire(idx + 1, self.stash) if idx + 1 < n else None
        self.ins = {}     # mb -> slot of the input
        self.outs = {}    # mb -> (output tensor, slot or None)
        self.ckpt = {}    # mb -> slot of a recomputation seed
        self.t0 = time.time()

    # forward

    def feed(self, mb, batch):
        if self.up is not None:
            self.up.post(mb)
            mb, i = self.up.wait()
        else:
            i = self.stash.must(("in", mb))  # leak: Bubble of fill() for a batch of another shape comes before ins has the slot
            self.stash.fill(i, batch)
        self.ins[mb] = self.stash.move(i, ("in", mb))
        return self.stash.t[i]

    def forward(self, mb, batch, keep_out):
        x = self.feed(mb, batch).requires_grad_()
        y = self.mod(x)
        o = None
        if keep_out:
            o = self.stash.take(("out", mb))  # leak: back() drops it only when there is no downstream stage, keep_out says nothing of that
            if o >= 0:
                self.stash.t[o].copy_(y.detach())
        self.outs[mb] = (y, o)
        if self.down is not None:
            self.down.send(y.detach())
        return y

    # backward

    def back(self, mb, loss_fn):
        y, o = self.outs.pop(mb)
        if self.down is None:
            loss = loss_fn(y)
            loss.backward()
            if o is not None and o >= 0:
                self.stash.drop(o)
        else:
            g = self.stash.must(("grad", mb))  # clean: dropped below, nothing between raises
            dist.recv(self.stash.t[g], self.idx + 1)
            y.backward(self.stash.t[g])
            self.stash.drop(g)
        i = self.ins.pop(mb)
        if self.up is not None:
            self.up.send(self.stash.t[i].grad)
        self.stash.drop(i)

    def seed(self, mb):
        i = self.stash.must(("seed", mb))  # leak: a second seed for the same microbatch overwrites the index in ckpt
        self.stash.t[i].view(-1)[0] = torch.initial_seed() % 65521
        self.ckpt[mb] = i

    def unseed(self, mb):
        i = self.ckpt.pop(mb, None)
        if i is None:
            return None
        v = int(self.stash.t[i].view(-1)[0])
        self.stash.drop(i)
        return v

    # whole steps

    def run(self, batches, loss_fn, keep_out=False):
        for kind, mb in order(self.idx, self.n, len(batches)):
            if kind == F:
                self.forward(mb, batches[mb], keep_out)
            else:
                self.back(mb, loss_fn)
        say("step", time.time() - self.t0)

    def evaluate(self, batches):
        """Forward only. A microbatch that is a bubble is left out."""
        good = []
        for mb, batch in enumerate(batches):
            i = self.stash.take(("eval", mb))  # clean: both the handler and the normal end drop it
            if i < 0:
                break
            try:
                if batch.shape[1:] != self.stash.t[i].shape[1:]:
                    raise Bubble("microbatch %d" % mb)
                self.stash.t[i][: len(batch)].copy_(batch)
                y = self.mod(self.stash.t[i][: len(batch)])
            except Bubble as e:
                say("left out", e)
                self.stash.drop(i)
                continue
            good.append(y)
            self.stash.drop(i)
        return good

    def time_hops(self, rounds):
        if self.down is None:
            return []
        a = self.stash.take("hop-a")  # leak: when there is no second slot the guard returns with the first
        b = self.stash.take("hop-b")  # clean: -1 is nothing and otherwise both are dropped
        if b < 0:
            return []
        ts = []
        if a >= 0:
            for _ in range(rounds):
                t = time.perf_counter()
                self.down.send(self.stash.t[a])
                dist.recv(self.stash.t[b], self.down.peer)
                ts.append(time.perf_counter() - t)
            self.stash.drop(a)
        self.stash.drop(b)
        return ts

    def reset(self):
        for i in self.ins.values():
            self.stash.drop(i)
        self.ins.clear()
        for w in (self.up, self.down):
            if w is not None:
                w.cancel()
        self.outs.clear()


def interleave(stages, batches, loss_fn):
    """Several virtual stages on one device; slot passes from chunk to chunk without a wire."""
    losses = []
    for mb, batch in enumerate(batches):
        hold = stages[0].stash.must(("chunk", mb))  # leak: rebound to the next chunk's slot in the loop, only the last is dropped
        stages[0].stash.t[hold].copy_(batch)
        y = stages[0].mod(stages[0].stash.t[hold])
        for s in stages[1:]:
            hold = s.stash.must(("chunk", mb))  # leak: the same rebinding loses it when another stage follows, or Bubble does
            s.stash.t[hold].copy_(y)
            y = s.mod(s.stash.t[hold])
        losses.append(loss_fn(y))
        stages[-1].stash.drop(hold)
    return losses


def double_buffer(stash, src):
    """Copies items of src one ahead of the consumer."""
    nxt = None
    try:
        for item in src:
            cur, nxt = nxt, stash.must("ahead")  # clean: near miss, cur is dropped after the yield and nxt by the finally
            stash.t[nxt].copy_(item)
            if cur is not None:
                try:
                    yield stash.t[cur]
                finally:
                    stash.drop(cur)
        if nxt is not None:
            yield stash.t[nxt]
    finally:
        if nxt is not None:
            stash.drop(nxt)
