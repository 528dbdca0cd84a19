"""DDP-like reducer: autograd hooks fill communication buffers, finish() writes the averages back."""
import threading
import weakref
from functools import partial
from typing import Dict, List, Optional

import torch
from torch import nn


class CommBufferPool:
    def __init__(self):
        self._lock = threading.Lock()
        self._free: Dict[int, List[torch.Tensor]] = {}

    def get_comm(self, numel: int) -> torch.Tensor:
        self._lock.acquire()  # clean: near miss, released in finally on both returns
        try:
            lst = self._free.get(numel)
            if lst:
                return lst.pop()
            return torch.zeros(numel)
        finally:
            self._lock.release()

    def put_comm(self, buf: torch.Tensor) -> None:
        with self._lock:
            self._free.setdefault(buf.numel(), []).append(buf)

    def drop_size(self, numel: int) -> bool:
        self._lock.acquire()  # leak: an unknown size returns False with the lock held
        if numel not in self._free:
            return False
        self._free.pop(numel)
        self._lock.release()
        return True


class Work:
    def __init__(self, buf: torch.Tensor, world: int):
        self.buf = buf
        self.world = world
        self.callbacks = []

    def wait(self) -> torch.Tensor:
        self.buf.div_(self.world)
        for cb in self.callbacks:
            cb()
        self.callbacks.clear()
        return self.buf


class Reducer:
    def __init__(self, module: nn.Module, pool: CommBufferPool, world: int, no_sync: bool = False):
        self.module = module
        self.pool = pool
        self.world = world
        self.no_sync = no_sync
        self.works: Dict[nn.Parameter, Work] = {}
        self.accum: Dict[nn.Parameter, torch.Tensor] = {}
        self.loss_buf: Optional[torch.Tensor] = None
        self._flag = pool.get_comm(1)  # clean: near miss, the finalizer puts it back with the reducer
        weakref.finalize(self, pool.put_comm, self._flag)
        for p in module.parameters():
            p.register_hook(partial(self._on_grad, p))

    def _on_grad(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        if self.no_sync or p in self.works:
            return
        buf = self.pool.get_comm(grad.numel())  # clean: near miss, one work per parameter, finish puts it back
        buf.copy_(grad.flatten())
        self.works[p] = Work(buf, self.world)

    def finish(self) -> None:
        for p, w in self.works.items():
            p.grad = w.wait().view_as(p).clone()
            self.pool.put_comm(w.buf)
        self.works = {}

    def accumulate(self, p: nn.Parameter, grad: torch.Tensor) -> None:
        if p not in self.accum:
            self.accum[p] = self.pool.get_comm(grad.numel())  # leak: zero() rebinds the dict to an empty one
        self.accum[p] += grad.flatten()

    def zero(self) -> None:
        self.accum = {}

    def reduce_async(self, t: torch.Tensor) -> Work:
        buf = self.pool.get_comm(t.numel())  # clean: near miss, the callback of the work puts it back on wait
        buf.copy_(t.flatten())
        w = Work(buf, self.world)
        w.callbacks.append(lambda: self.pool.put_comm(buf))
        return w

    def reduce_sync(self, t: torch.Tensor) -> torch.Tensor:
        return self.reduce_async(t).wait().clone()  # clean: near miss, wait runs the callback

    def reduce_if_large(self, t: torch.Tensor, limit: int) -> torch.Tensor:
        w = self.reduce_async(t)  # leak: small tensors are returned without waiting for the work
        if t.numel() < limit:
            return t
        return w.wait().clone()

    def reduce_many(self, ts: List[torch.Tensor]) -> List[torch.Tensor]:
        works = [self.reduce_async(t) for t in ts]  # clean: every work is waited for
        return [w.wait().clone() for w in works]

    def reduce_first(self, ts: List[torch.Tensor]) -> torch.Tensor:
        works = [self.reduce_async(t) for t in ts]  # leak: only the first work is waited for
        return works[0].wait().clone()

    def report_loss(self, loss: torch.Tensor) -> float:
        self.loss_buf = self.pool.get_comm(1)  # clean: near miss, put back and cleared in the same method
        self.loss_buf.fill_(float(loss))
        value = float(self.loss_buf / self.world)
        self.pool.put_comm(self.loss_buf)
        self.loss_buf = None
        return value

    def check_nan(self, t: torch.Tensor) -> bool:
        buf = self.pool.get_comm(t.numel())  # leak: buf is replaced by the isnan mask, which goes to the pool
        buf.copy_(t.flatten())
        buf = torch.isnan(buf)
        found = bool(buf.any())
        self.pool.put_comm(buf)
        return found
