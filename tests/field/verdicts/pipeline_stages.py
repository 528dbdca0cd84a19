# 1F1B pipeline schedule. Activation receive buffers are pooled per stage.
import logging
from collections import deque

import torch

log = logging.getLogger("pp")


class RecvPool:
    def __init__(self, shape, depth):
        self._bufs = [torch.empty(shape) for _ in range(depth)]
        self._flag = [False] * depth

    def acquire_recv(self):
        for i, used in enumerate(self._flag):
            if not used:
                self._flag[i] = True
                return i
        raise RuntimeError("all receive buffers busy")

    def release_recv(self, i):
        assert self._flag[i]
        self._flag[i] = False

    def tensor(self, i):
        return self._bufs[i]


class P2P:
    def __init__(self, links):
        self.links = links

    def recv(self, dst, peer):
        src = self.links.get(peer)
        if src is None:
            return False
        dst.copy_(src)
        return True

    def send(self, t, peer):
        self.links[peer] = t.clone()


class Stage:
    def __init__(self, module, pool, p2p, rank, world):
        self.module = module
        self.pool = pool
        self.p2p = p2p
        self.rank = rank
        self.world = world
        self.acts = deque()
        self.by_mb = {}

    @property
    def is_first(self):
        return self.rank == 0

    @property
    def is_last(self):
        return self.rank == self.world - 1

    def forward_step(self, mb, x=None):
        if self.is_first:
            inp = x
        else:
            slot = self.pool.acquire_recv()  # clean: queued in acts, backward_step releases in the same order
            self.p2p.recv(self.pool.tensor(slot), self.rank - 1)
            self.acts.append(slot)
            inp = self.pool.tensor(slot)
        y = self.module(inp)
        if not self.is_last:
            self.p2p.send(y, self.rank + 1)
        return y

    def backward_step(self, grad):
        if not self.is_first:
            slot = self.acts.popleft()
            self.p2p.send(grad * self.pool.tensor(slot), self.rank - 1)
            self.pool.release_recv(slot)

    def forward_mb(self, mb):
        slot = self.pool.acquire_recv()  # leak: a missing upstream message returns None with the slot taken
        if not self.p2p.recv(self.pool.tensor(slot), self.rank - 1):
            return None
        self.by_mb[mb] = slot
        return self.module(self.pool.tensor(slot))

    def backward_mb(self, mb, grad):
        slot = self.by_mb.pop(mb)
        g = grad * self.pool.tensor(slot)
        self.pool.release_recv(slot)
        return g

    def flush(self):
        while self.acts:
            self.pool.release_recv(self.acts.popleft())
        for slot in self.by_mb.values():
            self.pool.release_recv(slot)
        self.by_mb = {}

    def eval_step(self, x=None):
        slot = None if self.is_first else self.pool.acquire_recv()  # clean: near miss, is_first does not change between the two tests
        if slot is not None:
            self.p2p.recv(self.pool.tensor(slot), self.rank - 1)
            x = self.pool.tensor(slot)
        y = self.module(x).detach()
        if not self.is_first:
            self.pool.release_recv(slot)
        return y

    def shape_handshake(self):
        slot = self.pool.acquire_recv()  # clean: released before the shape is returned
        self.p2p.recv(self.pool.tensor(slot), self.rank - 1)
        shape = tuple(self.pool.tensor(slot).shape)
        self.pool.release_recv(slot)
        return shape

    def loopback(self, rounds):
        slot = self.pool.acquire_recv()  # leak: overwritten by the slot of the first round
        total = 0.0
        for _ in range(rounds):
            slot = self.pool.acquire_recv()  # clean: released in the same round
            self.p2p.recv(self.pool.tensor(slot), self.rank)
            total += float(self.pool.tensor(slot).sum())
            self.pool.release_recv(slot)
        return total


class InterleavedStage(Stage):
    def __init__(self, modules, pool, p2p, rank, world):
        super().__init__(modules[0], pool, p2p, rank, world)
        self.modules = modules
        self.chunk_slots = [None] * len(modules)

    def forward_chunk(self, c):
        if self.chunk_slots[c] is None:
            self.chunk_slots[c] = self.pool.acquire_recv()  # clean: near miss, filled once per chunk and emptied by flush
        t = self.pool.tensor(self.chunk_slots[c])
        self.p2p.recv(t, self.rank - 1)
        return self.modules[c](t)

    def flush(self):
        super().flush()
        for c, slot in enumerate(self.chunk_slots):
            if slot is not None:
                self.pool.release_recv(slot)
                self.chunk_slots[c] = None

    def warmup(self, n):
        slots = [self.pool.acquire_recv() for _ in range(n)]  # leak: break on the first failed receive leaves the rest of the list
        ok = True
        for s in slots:
            ok = self.p2p.recv(self.pool.tensor(s), self.rank - 1)
            self.pool.release_recv(s)
            if not ok:
                log.warning("stage %d: warm-up stopped", self.rank)
                break
        return ok

    def warmup_all(self, n):
        slots = [self.pool.acquire_recv() for _ in range(n)]  # clean: near miss, break ends the receiving, a second loop releases every slot
        ok = True
        for s in slots:
            ok = self.p2p.recv(self.pool.tensor(s), self.rank - 1)
            if not ok:
                break
        for s in slots:
            self.pool.release_recv(s)
        return ok


class DualPipe(Stage):
    """Keeps one slot per direction."""

    def __init__(self, module, pool, p2p, rank, world):
        super().__init__(module, pool, p2p, rank, world)
        self.up = self.pool.acquire_recv()  # clean: stop releases it
        self.down = self.pool.acquire_recv()  # leak: stop does not release it

    def stop(self):
        self.pool.release_recv(self.up)
        self.up = self.down = None

    def exchange(self, both):
        a = self.pool.acquire_recv()  # clean: released at the end on both paths
        b = self.pool.acquire_recv() if both else a  # clean: near miss, an own slot only with both, and then released
        self.p2p.recv(self.pool.tensor(a), self.rank - 1)
        self.p2p.recv(self.pool.tensor(b), self.rank + 1)
        out = self.pool.tensor(a) + self.pool.tensor(b)
        if b != a:
            self.pool.release_recv(b)
        self.pool.release_recv(a)
        return out
