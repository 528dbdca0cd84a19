"""Activation recomputation with a spill store for the saved inputs."""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn


class SpillStore:
    """Host tensors that hold spilled activations."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._empty: Dict[Tuple[int, torch.dtype], Deque[Tensor]] = {}
        self._used: Dict[int, Tensor] = {}
        self._mutex = threading.Lock()

    def obtain(self, numel: int, dtype: torch.dtype) -> Optional[Tensor]:
        with self._mutex:
            shelf = self._empty.get((numel, dtype))
            if shelf:
                t = shelf.pop()  # clean: listed as used and returned
            elif len(self._used) < self.budget:
                t = torch.empty(numel, dtype=dtype)
            else:
                return None
            self._used[t.data_ptr()] = t
            return t

    def recycle(self, t: Tensor) -> None:
        with self._mutex:
            base = self._used.pop(t.data_ptr(), None)
            if base is not None:
                self._empty.setdefault((base.numel(), base.dtype), deque()).append(base)

    def rebalance(self, dtype: torch.dtype, numel: int) -> bool:
        with self._mutex:
            for (n, d), shelf in self._empty.items():
                if d == dtype and n >= numel and shelf:
                    t = shelf.popleft()  # clean: near miss, trimmed tensors go under their new size and the others go back
                    if n < 2 * numel:
                        shelf.append(t)
                        continue
                    self._empty.setdefault((numel, dtype), deque()).append(t[:numel])
                    return True
        return False


STORE = SpillStore(budget=256)


def spill(t: Tensor) -> Tuple[Optional[Tensor], torch.Size]:
    host = STORE.obtain(t.numel(), t.dtype)  # clean: handed to the caller with the shape
    if host is not None:
        host.copy_(t.detach().reshape(-1))
    return host, t.shape


def unspill(host: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    out = host.view(shape).to(device, copy=True)
    STORE.recycle(host)
    return out


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.device = x.device
        host, shape = spill(x)  # clean: near miss, moved into ctx as a pair and recycled by unspill in backward
        if host is None:
            ctx.spilled = None
            ctx.save_for_backward(x)
        else:
            ctx.spilled = (host, shape)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        if ctx.spilled is None:
            (x,) = ctx.saved_tensors
        else:
            host, shape = ctx.spilled
            ctx.spilled = None
            x = unspill(host, shape, ctx.device)
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            y = ctx.fn(x)
        (gx,) = torch.autograd.grad(y, x, grad)
        return None, gx


class RecomputeMany(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        ctx.fn = fn
        ctx.saved: List[Tuple[Tensor, torch.Size, torch.device]] = []
        for x in xs:
            host, shape = spill(x)  # leak: backward skips the entries whose input needs no gradient and never recycles them
            if host is None:
                host = x.detach().reshape(-1)
            ctx.saved.append((host, shape, x.device))
        with torch.no_grad():
            return fn(*xs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        inputs: List[Tensor] = []
        for i, (host, shape, device) in enumerate(ctx.saved):
            if not ctx.needs_input_grad[i + 1]:
                inputs.append(host.view(shape).to(device))
                continue
            inputs.append(unspill(host, shape, device).requires_grad_(True))
        with torch.enable_grad():
            y = ctx.fn(*inputs)
        live = [t for t in inputs if t.requires_grad]
        grads = iter(torch.autograd.grad(y, live, grad))
        return (None, *[next(grads) if t.requires_grad else None for t in inputs])


class SpillTask:
    """A spill that is carried out later by the background flusher."""

    def __init__(self, name: str, source: Tensor, host: Tensor) -> None:
        self.name = name
        self.source = source
        self.host = host

    def run(self) -> None:
        self.host.copy_(self.source.detach().reshape(-1))


class DeferredSpiller:
    def __init__(self, store: SpillStore) -> None:
        self.store = store
        self.tasks: Deque[SpillTask] = deque()
        self.done: Dict[str, SpillTask] = {}

    def enqueue(self, name: str, t: Tensor) -> bool:
        host = self.store.obtain(t.numel(), t.dtype)  # clean: near miss, moved through the task queue into done and recycled by fetch or abandon
        if host is None:
            return False
        self.tasks.append(SpillTask(name, t, host))
        return True

    def enqueue_unique(self, name: str, t: Tensor) -> bool:
        host = self.store.obtain(t.numel(), t.dtype)  # leak: a name that is done already returns False with the tensor obtained
        if host is None or name in self.done:
            return False
        self.tasks.append(SpillTask(name, t, host))
        return True

    def flush(self) -> None:
        while self.tasks:
            task = self.tasks.popleft()
            task.run()
            previous = self.done.get(task.name)
            if previous is not None:
                self.store.recycle(previous.host)
            self.done[task.name] = task

    def fetch(self, name: str, out: Tensor) -> bool:
        task = self.done.pop(name, None)
        if task is None:
            return False
        out.view(-1).copy_(task.host)
        self.store.recycle(task.host)
        return True

    def abandon(self) -> None:
        self.flush()
        for task in self.done.values():
            self.store.recycle(task.host)
        self.done.clear()


def roundtrip_error(t: Tensor, dtype: torch.dtype) -> float:
    host = STORE.obtain(t.numel(), dtype)  # leak: the cast back rebinds host when the precision differs
    if host is None:
        return 0.0
    host.copy_(t.reshape(-1))
    if dtype != t.dtype:
        host = host.to(t.dtype)
    err = float((host - t.reshape(-1)).abs().max())
    STORE.recycle(host)
    return err
