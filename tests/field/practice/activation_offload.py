"""Saved-tensor hooks that move activations to pooled host memory during the forward pass."""
import dataclasses
import weakref
from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch.autograd.graph import saved_tensors_hooks

_MIN_NUMEL = 1 << 16


class HostBuffer:
    __slots__ = ("data", "pool", "__weakref__")

    def __init__(self, data: torch.Tensor, pool: "HostBufferPool"):
        self.data = data
        self.pool = pool


class HostBufferPool:
    def __init__(self, budget: int):
        self.budget = budget
        self._cache: List[HostBuffer] = []
        self.lent = 0

    def borrow(self, like: torch.Tensor) -> Optional[HostBuffer]:
        nbytes = like.numel() * like.element_size()
        if self.lent + nbytes > self.budget:
            return None
        for i, b in enumerate(self._cache):
            if b.data.shape == like.shape and b.data.dtype == like.dtype:
                self.lent += nbytes
                return self._cache.pop(i)
        self.lent += nbytes
        return HostBuffer(torch.empty_like(like, device="cpu"), self)

    def give_back(self, b: HostBuffer) -> None:
        self.lent -= b.data.numel() * b.data.element_size()
        self._cache.append(b)

    def borrow_contiguous(self, like: torch.Tensor) -> Optional[HostBuffer]:
        b = self.borrow(like)  # leak: a strided buffer is refused without give_back
        if b is not None and not b.data.is_contiguous():
            return None
        return b


@dataclasses.dataclass
class Packed:
    buf: HostBuffer
    device: torch.device


class OffloadHooks:
    def __init__(self, pool: HostBufferPool):
        self.pool = pool
        self.live: Dict[int, Packed] = {}

    def pack(self, t: torch.Tensor) -> Union[torch.Tensor, Packed]:
        if t.numel() < _MIN_NUMEL:
            return t
        buf = self.pool.borrow(t)  # clean: near miss, wrapped for unpack(), which gives it back
        if buf is None:
            return t
        buf.data.copy_(t, non_blocking=True)
        return Packed(buf, t.device)

    def unpack(self, p: Union[torch.Tensor, Packed]) -> torch.Tensor:
        if isinstance(p, torch.Tensor):
            return p
        out = p.buf.data.to(p.device)
        self.pool.give_back(p.buf)
        return out

    def context(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, self.unpack)


class LayerOffloader:
    """Explicit variant: one activation per layer, kept by index."""

    def __init__(self, pool: HostBufferPool, num_layers: int, enabled: bool = True):
        self.pool = pool
        self.enabled = enabled
        self.saved: List[Optional[HostBuffer]] = [None] * num_layers
        self.rng_states: List[HostBuffer] = []

    def store(self, layer: int, act: torch.Tensor) -> bool:
        if not self.enabled:
            return False
        prev = self.saved[layer]
        if prev is not None:
            self.pool.give_back(prev)
        self.saved[layer] = self.pool.borrow(act)  # clean: near miss, the previous one was given back first
        if self.saved[layer] is None:
            return False
        self.saved[layer].data.copy_(act)
        return True

    def load(self, layer: int, device: torch.device) -> Optional[torch.Tensor]:
        buf, self.saved[layer] = self.saved[layer], None
        if buf is None:
            return None
        out = buf.data.to(device)
        self.pool.give_back(buf)
        return out

    def store_rng(self, state: torch.Tensor) -> None:
        buf = self.pool.borrow(state)  # leak: reset() replaces the list without giving back
        if buf is not None:
            buf.data.copy_(state)
            self.rng_states.append(buf)

    def reset(self) -> None:
        for i in range(len(self.saved)):
            self.load(i, torch.device("cpu"))
        self.rng_states = []

    def attach(self, owner: Any, act: torch.Tensor) -> torch.Tensor:
        buf = self.pool.borrow(act)  # clean: near miss, given back by the finalizer of the owner
        if buf is None:
            return act
        buf.data.copy_(act)
        weakref.finalize(owner, self.pool.give_back, buf)
        return buf.data

    def with_host(self, act: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        buf = self.pool.borrow_contiguous(act)  # clean: both branches below end in give_back or had none
        if buf is None:
            return fn(act.cpu())
        buf.data.copy_(act)
        res = fn(buf.data).clone()
        self.pool.give_back(buf)
        return res

    def stats(self, acts: List[torch.Tensor]) -> List[float]:
        res = []
        for a in acts:
            buf = self.pool.borrow(a) if a.is_cuda else None  # leak: the guard at the end asks for another property
            src = a if buf is None else buf.data.copy_(a)
            res.append(float(src.float().std()))
            if buf is not None and a.requires_grad:
                self.pool.give_back(buf)
        return res

    def stats_cuda(self, acts: List[torch.Tensor]) -> List[float]:
        res = []
        for a in acts:
            buf = self.pool.borrow(a) if a.is_cuda else None  # clean: near miss, the same guard at both ends
            src = a if buf is None else buf.data.copy_(a)
            res.append(float(src.float().std()))
            if buf is not None:
                self.pool.give_back(buf)
        return res

    def fold(self, acts: List[torch.Tensor]) -> Optional[torch.Tensor]:
        acc = None
        for a in acts:
            buf = self.pool.borrow(a)  # leak: the buffer becomes `acc` and is lost with the next sum
            if buf is None:
                break
            buf.data.copy_(a)
            acc = buf.data if acc is None else acc + buf.data
        return acc
