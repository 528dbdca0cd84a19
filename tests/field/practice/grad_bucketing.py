# Gradient bucketing for data parallel training.
#
# Buckets are filled in reverse parameter order.  When one is full it is
# reduced asynchronously; finish() waits and writes the results back.

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.nn import Parameter


class Pending(NamedTuple):
    storage: torch.Tensor
    work: Any
    params: List[Parameter]


class BucketArena(object):
    """A stack of equally large flat storages."""

    def __init__(self, numel, count, device="cpu"):
        self.numel = numel
        self.stack = [torch.zeros(numel, device=device) for _ in range(count)]
        self.high_water = 0
        self.total = count

    def alloc(self):
        if not self.stack:
            return None
        t = self.stack.pop()
        self.high_water = max(self.high_water, self.total - len(self.stack))
        return t

    def dealloc(self, t):
        self.stack.append(t)


class Bucketer(object):
    def __init__(self, params, arena, group=None):
        # type: (Iterable[Parameter], BucketArena, Any) -> None
        self.params = list(params)[::-1]
        self.arena = arena
        self.group = group
        self.pending = []  # type: List[Pending]
        self.current = None  # type: Optional[torch.Tensor]
        self.fill = 0
        self.members = []  # type: List[Parameter]

    def _world(self):
        return dist.get_world_size(self.group)

    def push(self, p):
        n = p.grad.numel()
        if self.current is not None and self.fill + n > self.arena.numel:
            self._launch()
        if self.current is None:
            self.current = self.arena.alloc()  # clean: near miss, only when none is held; _launch() moves it to pending
            self.fill = 0
            if self.current is None:
                raise MemoryError("no bucket storage left")
        self.current[self.fill:self.fill + n].copy_(p.grad.view(-1))
        self.fill += n
        self.members.append(p)

    def _launch(self):
        if self.current is None:
            return
        work = dist.all_reduce(self.current[:self.fill], group=self.group, async_op=True)
        self.pending.append(Pending(self.current, work, self.members))
        self.current, self.members, self.fill = None, [], 0

    def finish(self):
        self._launch()
        for item in self.pending:
            item.work.wait()
            off = 0
            for p in item.params:
                n = p.numel()
                p.grad.copy_(item.storage[off:off + n].view_as(p.grad))
                off += n
            self.arena.dealloc(item.storage)
        self.pending = []

    def grad_norm(self):
        acc = self.arena.alloc()  # leak: an infinite norm returns early
        if acc is None:
            return float("nan")
        acc.zero_()
        for i, p in enumerate(self.params):
            acc[i % self.arena.numel] += p.grad.norm() ** 2
        total = math.sqrt(float(acc.sum()))
        if math.isinf(total):
            return total
        self.arena.dealloc(acc)
        return total

    def broadcast_params(self, src=0):
        flat = self.arena.alloc()  # clean: the loop has no way out but its end
        if flat is None:
            raise MemoryError("no bucket storage left")
        for p in self.params:
            view = flat[:p.numel()]
            view.copy_(p.data.view(-1))
            dist.broadcast(view, src=src, group=self.group)
            p.data.copy_(view.view_as(p))
        self.arena.dealloc(flat)

    def check_replicas(self):
        # returns names of diverging parameters
        mine = self.arena.alloc()  # leak: stays out when there is no second storage
        if mine is None:
            return []
        other = self.arena.alloc()  # clean: deallocated at the end, None returns hold nothing of it
        if other is None:
            return []
        bad = []
        for i, p in enumerate(self.params):
            a, b = mine[:p.numel()], other[:p.numel()]
            a.copy_(p.data.view(-1))
            b.copy_(a)
            dist.all_reduce(b, group=self.group)
            if not torch.allclose(a * self._world(), b):
                bad.append(i)
        self.arena.dealloc(mine)
        self.arena.dealloc(other)
        return bad


class ErrorFeedback(object):
    """Keeps the compression error per parameter in arena storage."""

    def __init__(self, arena, keep=True):
        self.arena = arena
        self.keep = keep
        self.errors = {}  # type: Dict[int, torch.Tensor]

    def compress(self, idx, grad, k):
        err = self.errors.get(idx)
        if err is None:
            err = self.arena.alloc()  # leak: with keep off the fresh storage is neither stored nor given back
            if err is None:
                return grad
            err.zero_()
            if self.keep:
                self.errors[idx] = err
        g = grad.view(-1)
        g.add_(err[:g.numel()])
        top = g.abs().topk(k).indices
        out = torch.zeros_like(g)
        out[top] = g[top]
        err[:g.numel()].copy_(g - out)
        return out

    def reset(self):
        for err in self.errors.values():
            self.arena.dealloc(err)
        self.errors.clear()

    def rescale(self, factor):
        for idx in list(self.errors):
            new = self.arena.alloc()  # clean: near miss, replaces the old storage, which is deallocated first
            if new is None:
                break
            old = self.errors.pop(idx)
            torch.mul(old, factor, out=new)
            self.arena.dealloc(old)
            self.errors[idx] = new

    def quantise(self, grad):
        buf = self.arena.alloc()  # leak: rebound by to(), what comes back is an int8 copy
        if buf is None:
            return None
        n = grad.numel()
        buf[:n].copy_(grad.view(-1))
        scale = buf[:n].abs().max() / 127
        buf = (buf[:n] / scale).to(torch.int8)
        return buf, scale
