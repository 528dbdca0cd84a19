"""Optimizer state offload: fp32 states live on NVMe and pass through host buffers."""
from __future__ import annotations

import os
from typing import Dict, List, Optional

import torch


class HostBuffers:
    """Free buffers of one length in a list; a counter bounds how many exist."""

    def __init__(self, numel: int, limit: int) -> None:
        self.numel = numel
        self.limit = limit
        self.made = 0
        self.free: List[torch.Tensor] = []

    def fetch(self) -> Optional[torch.Tensor]:
        if self.free:
            return self.free.pop()
        if self.made == self.limit:
            return None
        self.made += 1
        return torch.empty(self.numel, pin_memory=True)

    def stow(self, buf: torch.Tensor) -> None:
        self.free.append(buf)


class AioContexts:
    """A handful of io contexts by number."""

    def __init__(self, n: int) -> None:
        self.idle = set(range(n))

    def begin(self) -> int:
        if not self.idle:
            return -1
        return self.idle.pop()

    def end(self, ctx: int) -> None:
        self.idle.add(ctx)


class SwapFile:
    def __init__(self, folder: str, bufs: HostBuffers, aio: AioContexts) -> None:
        self.folder = folder
        self.bufs = bufs
        self.aio = aio
        self.reads = 0

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key + ".swp")

    def swap_in(self, key: str, into: Optional[torch.Tensor] = None) -> Optional[torch.Tensor]:
        """Read key's state. The result is `into`, or a buffer that the caller must stow()."""
        owned = into is None
        if owned:
            into = self.bufs.fetch()  # clean: near miss, returned, and stowed under the same flag when the file is missing
            if into is None:
                return None
        path = self._path(key)
        if not os.path.exists(path):
            if owned:
                self.bufs.stow(into)
            return None
        ctx = self.aio.begin()  # clean: ended after the read
        raw = torch.from_file(path, size=into.numel())
        into.copy_(raw)
        if ctx >= 0:
            self.aio.end(ctx)
        self.reads += 1
        return into

    def swap_out(self, key: str, state: torch.Tensor) -> bool:
        ctx = self.aio.begin()  # leak: not ended when no buffer is free
        if ctx < 0:
            return False
        buf = self.bufs.fetch()  # clean: stowed after the write
        if buf is None:
            return False
        buf[:state.numel()].copy_(state.view(-1))
        with open(self._path(key), "wb") as f:  # clean: closed by with
            f.write(buf.numpy().tobytes())
        self.bufs.stow(buf)
        self.aio.end(ctx)
        return True

    def exists_on_disk(self, key: str) -> bool:
        ctx = self.aio.begin()  # leak: context 0 is taken for none and not ended
        found = os.path.exists(self._path(key))
        if ctx > 0:
            self.aio.end(ctx)
        return found

    def verify(self, key: str, expect: float) -> bool:
        buf = self.swap_in(key)  # leak: not stowed when the sum differs
        if buf is None:
            return False
        if abs(float(buf.sum()) - expect) > 1e-3:
            return False
        self.bufs.stow(buf)
        return True

    def norm(self, key: str) -> float:
        buf = self.swap_in(key)  # clean: stowed before the return
        if buf is None:
            return 0.0
        n = float(buf.norm())
        self.bufs.stow(buf)
        return n

    def copy_of(self, key: str) -> torch.Tensor:
        return self.swap_in(key).clone()  # leak: the buffer is cloned and dropped

class StepBuffers:
    """The buffers of one parameter group's step."""

    __slots__ = ("grad", "exp_avg", "exp_sq", "borrowed")

    def __init__(self, grad, exp_avg, exp_sq, borrowed):
        self.grad = grad
        self.exp_avg = exp_avg
        self.exp_sq = exp_sq
        self.borrowed = borrowed


class OffloadAdam:
    def __init__(self, swap: SwapFile, lr: float, betas=(0.9, 0.95), eps=1e-8) -> None:
        self.swap = swap
        self.bufs = swap.bufs
        self.lr, self.betas, self.eps = lr, betas, eps
        self.ready: Dict[str, StepBuffers] = {}
        self.pending_grads: Dict[str, torch.Tensor] = {}

    def stage_grad(self, key: str, grad: torch.Tensor) -> bool:
        buf = self.pending_grads.get(key)
        if buf is None:
            buf = self.bufs.fetch()  # clean: near miss, kept in pending_grads, which flush_grads() empties
            if buf is None:
                return False
            self.pending_grads[key] = buf
        buf[:grad.numel()].copy_(grad.view(-1))
        return True

    def flush_grads(self) -> None:
        while self.pending_grads:
            key, buf = self.pending_grads.popitem()
            self.swap.swap_out(key + ".g", buf)
            self.bufs.stow(buf)

    def prefetch(self, key: str, grad: torch.Tensor) -> bool:
        if key in self.ready:
            return True
        m = self.swap.swap_in(key + ".m")  # clean: moved into ready, or stowed when there is no v
        if m is None:
            return False
        v = self.swap.swap_in(key + ".v")  # clean: near miss, moved into ready, which step() and abandon() empty
        if v is None:
            self.bufs.stow(m)
            return False
        self.ready[key] = StepBuffers(grad, m, v, borrowed=True)
        return True

    def step(self, key: str, param: torch.Tensor) -> bool:
        sb = self.ready.pop(key, None)
        if sb is None:
            return False
        n = param.numel()
        b1, b2 = self.betas
        m, v = sb.exp_avg[:n], sb.exp_sq[:n]
        m.mul_(b1).add_(sb.grad.view(-1), alpha=1 - b1)
        v.mul_(b2).addcmul_(sb.grad.view(-1), sb.grad.view(-1), value=1 - b2)
        param.view(-1).sub_(self.lr * m / (v.sqrt() + self.eps))
        self.swap.swap_out(key + ".m", m)
        self.swap.swap_out(key + ".v", v)
        self._release(sb)
        return True

    def abandon(self) -> None:
        for sb in self.ready.values():
            self._release(sb)
        self.ready.clear()

    def _release(self, sb: StepBuffers) -> None:
        if sb.borrowed:
            self.bufs.stow(sb.exp_avg)
            self.bufs.stow(sb.exp_sq)

    def first_step(self, key: str, param: torch.Tensor, grad: torch.Tensor) -> bool:
        if key in self.ready:
            return self.step(key, param)
        m = self.bufs.fetch()  # leak: stored as not borrowed, so step() does not stow it
        if m is None:
            return False
        v = self.bufs.fetch()  # leak: stored as not borrowed, so step() does not stow it
        if v is None:
            self.bufs.stow(m)
            return False
        m.zero_()
        v.zero_()
        self.ready[key] = StepBuffers(grad, m, v, borrowed=False)
        return self.step(key, param)

    def scale_states(self, keys: List[str], factor: float) -> int:
        buf = self.bufs.fetch()  # clean: stowed after the loop, which swaps into it
        if buf is None:
            return 0
        done = 0
        for key in keys:
            got = self.swap.swap_in(key, into=buf)  # clean: near miss, the result is the caller's own buffer
            if got is None:
                continue
            got.mul_(factor)
            if self.swap.swap_out(key, got):
                done += 1
        self.bufs.stow(buf)
        return done
