"""Bucketed gradient reduction with post-accumulate hooks."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Dict, Iterable, List, Optional

import torch
import torch.distributed as dist

log = logging.getLogger("ddp.bucket")


class FlatPool:
    def __init__(self, numel: int, count: int) -> None:
        self._numel = numel
        self._idle: List[torch.Tensor] = [torch.zeros(numel) for _ in range(count)]
        self._out: set[int] = set()

    @property
    def numel(self) -> int:
        return self._numel

    def alloc(self) -> torch.Tensor:
        if not self._idle:
            raise RuntimeError("flat buffers exhausted")
        t = self._idle.pop()  # clean: recorded and handed to the caller
        self._out.add(id(t))
        return t

    def dealloc(self, t: torch.Tensor) -> None:
        if id(t) not in self._out:
            raise ValueError("not one of ours")
        self._out.discard(id(t))
        self._idle.append(t)


class Work:
    """Thin stand-in for an asynchronous collective."""

    def __init__(self) -> None:
        self._callbacks: List[Callable[[], None]] = []
        self._waited = False

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._callbacks.append(fn)

    def wait(self) -> None:
        if not self._waited:
            self._waited = True
            for fn in self._callbacks:
                fn()


class Reducer:
    def __init__(self, params: Iterable[torch.nn.Parameter], pool: FlatPool, average: bool = True) -> None:
        self.params = list(params)
        self.pool = pool
        self.average = average
        self.works: List[Work] = []
        self.current: Optional[torch.Tensor] = None
        self.offset = 0
        self.members: List[torch.nn.Parameter] = []
        self._hooks: List[Any] = []

    def attach(self) -> None:
        for p in self.params:
            self._hooks.append(p.register_post_accumulate_grad_hook(self._on_grad))

    def _on_grad(self, p: torch.nn.Parameter) -> None:
        assert p.grad is not None
        n = p.grad.numel()
        if self.current is not None and self.offset + n > self.pool.numel:
            self.flush()
        if self.current is None:
            self.current = self.pool.alloc()  # clean: near miss, only when there is none, flush passes it to the callback
            self.offset = 0
        self.current[self.offset : self.offset + n].copy_(p.grad.flatten())
        self.members.append(p)
        self.offset += n

    def _reduce(self, t: torch.Tensor) -> Work:
        if dist.is_initialized():
            dist.all_reduce(t)
            if self.average:
                t.div_(dist.get_world_size())
        return Work()

    def _scatter_back(self, t: torch.Tensor, members: List[torch.nn.Parameter]) -> None:
        pos = 0
        for p in members:
            p.grad.copy_(t[pos : pos + p.numel()].view_as(p))
            pos += p.numel()
        self.pool.dealloc(t)

    def flush(self) -> None:
        if self.current is None:
            return
        buf, members = self.current, self.members
        self.current, self.members = None, []
        work = self._reduce(buf)
        work.add_done_callback(functools.partial(self._scatter_back, buf, members))
        self.works.append(work)

    def finalize(self) -> None:
        self.flush()
        for w in self.works:
            w.wait()
        self.works.clear()

    def reduce_one(self, p: torch.nn.Parameter) -> None:
        buf = self.pool.alloc()  # clean: near miss, the closure gives it back when the work is waited for
        n = p.numel()
        buf[:n].copy_(p.grad.flatten())
        work = self._reduce(buf)

        def done() -> None:
            p.grad.copy_(buf[:n].view_as(p))
            self.pool.dealloc(buf)

        work.add_done_callback(done)
        self.works.append(work)

    def reduce_norm(self) -> float:
        buf = self.pool.alloc()  # leak: the callback is defined but never attached to the work
        buf[0] = sum(float(p.grad.pow(2).sum()) for p in self.params if p.grad is not None)
        value: Dict[str, float] = {}

        def done() -> None:
            value["norm"] = float(buf[0].sqrt())
            self.pool.dealloc(buf)

        work = self._reduce(buf)
        work.wait()
        return value.get("norm", float(buf[0].sqrt()))

    def clip(self, max_norm: float) -> Optional[float]:
        buf = self.pool.alloc()  # leak: with no gradients None is returned and the buffer stays out
        grads = [p.grad for p in self.params if p.grad is not None]
        if not grads:
            return None
        for i, g in enumerate(grads):
            buf[i] = g.norm()
        norm = float(buf[: len(grads)].norm())
        self.pool.dealloc(buf)
        scale = max_norm / (norm + 1e-6)
        if scale < 1.0:
            for g in grads:
                g.mul_(scale)
        return norm

    def reduce_sparse(self, rows: Dict[int, torch.Tensor]) -> Dict[int, torch.Tensor]:
        out: Dict[int, torch.Tensor] = {}
        for i, r in rows.items():
            buf = self.pool.alloc()  # leak: rows that do not fit are skipped after the buffer was taken
            if r.numel() > self.pool.numel:
                log.warning("row %d too large for flat buffer", i)
                continue
            buf[: r.numel()].copy_(r.flatten())
            self._reduce(buf).wait()
            out[i] = buf[: r.numel()].view_as(r).clone()
            self.pool.dealloc(buf)
        return out

    def broadcast_params(self) -> None:
        for p in self.params:
            buf = self.pool.alloc()  # clean: deallocated in every round
            buf[: p.numel()].copy_(p.data.flatten())
            if dist.is_initialized():
                dist.broadcast(buf, 0)
            p.data.copy_(buf[: p.numel()].view_as(p))
            self.pool.dealloc(buf)

    def reset(self) -> None:
        """Start over after a failed step."""
        if self.current is not None:
            self.pool.dealloc(self.current)
            self.current = None
        self.members = []
        self.finalize()
