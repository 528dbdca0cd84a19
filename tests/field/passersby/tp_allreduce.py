"""Registered communication buffers for the custom all-reduce path."""
from __future__ import annotations

import contextlib
import logging
import threading
from typing import Iterator, Optional

import torch
import torch.distributed as dist

LOG = logging.getLogger(__name__)

MAX_ONE_SHOT = 512 * 1024


class CommBufferPool:
    """Bitmap of equally sized slots cut out of one registered region."""

    def __init__(self, slots: int, slot_bytes: int, device: str = "cuda") -> None:
        self.region = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
        self.slot_bytes = slot_bytes
        self.used = [False] * slots
        self.mutex = threading.Lock()

    def get_slot(self) -> int:
        with self.mutex:  # clean: with statement
            for i, busy in enumerate(self.used):
                if not busy:
                    self.used[i] = True  # clean: the index goes to the caller
                    return i
        return -1

    def put_slot(self, i: int) -> None:
        with self.mutex:  # clean: with statement
            self.used[i] = False

    def tensor(self, i: int, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.numel() * like.element_size()
        raw = self.region[i * self.slot_bytes : i * self.slot_bytes + nbytes]
        return raw.view(like.dtype).view_as(like)


class TensorParallelComm:
    def __init__(self, pool: CommBufferPool, group: Optional[dist.ProcessGroup] = None) -> None:
        self.pool = pool
        self.group = group
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.fallbacks = 0

    def _fits(self, t: torch.Tensor) -> bool:
        return t.is_contiguous() and t.numel() * t.element_size() <= self.pool.slot_bytes

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        if self.world == 1:
            return t
        slot = self.pool.get_slot()  # leak: tensors that do not fit take the fallback with the slot in hand
        if slot < 0 or not self._fits(t):
            self.fallbacks += 1
            dist.all_reduce(t, group=self.group)
            return t
        staged = self.pool.tensor(slot, t)
        staged.copy_(t)
        dist.all_reduce(staged, group=self.group)
        out = staged.clone()
        self.pool.put_slot(slot)
        return out

    def all_reduce_(self, t: torch.Tensor) -> None:
        if self.world == 1 or not self._fits(t):
            dist.all_reduce(t, group=self.group)
            return
        slot = self.pool.get_slot()  # clean: near miss, -1 holds nothing, otherwise put back
        if slot == -1:
            dist.all_reduce(t, group=self.group)
            return
        staged = self.pool.tensor(slot, t)
        staged.copy_(t)
        dist.all_reduce(staged, group=self.group)
        t.copy_(staged)
        self.pool.put_slot(slot)

    @contextlib.contextmanager
    def slot(self) -> Iterator[int]:
        idx = self.pool.get_slot()  # clean: near miss, put back in finally, the raise is for -1
        if idx < 0:
            raise RuntimeError("no communication slot")
        try:
            yield idx
        finally:
            self.pool.put_slot(idx)

    def all_gather(self, t: torch.Tensor) -> torch.Tensor:
        with self.slot() as idx:  # clean: with statement
            staged = self.pool.tensor(idx, t)
            staged.copy_(t)
            outs = [torch.empty_like(t) for _ in range(self.world)]
            dist.all_gather(outs, staged, group=self.group)
        return torch.cat(outs, dim=0)

    def reduce_scatter(self, t: torch.Tensor) -> Optional[torch.Tensor]:
        src = self.pool.get_slot()  # leak: not put back when the second slot is missing
        if src < 0:
            return None
        dst = self.pool.get_slot()  # clean: -1 holds nothing, else put back
        if dst < 0:
            LOG.debug("only one slot left, using plain reduce_scatter")
            return None
        inp = self.pool.tensor(src, t)
        inp.copy_(t)
        piece = t.chunk(self.world, dim=0)[0]
        out = self.pool.tensor(dst, piece)
        dist.reduce_scatter_tensor(out, inp, group=self.group)
        res = out.clone()
        self.pool.put_slot(src)
        self.pool.put_slot(dst)
        return res

    def exchange(self, send: torch.Tensor, peer: int) -> Optional[torch.Tensor]:
        a = self.pool.get_slot()  # clean: near miss, the rollback puts it back if the second is missing
        if a < 0:
            return None
        b = self.pool.get_slot()  # clean: put back at the end
        if b < 0:
            self.pool.put_slot(a)
            return None
        out, inp = self.pool.tensor(a, send), self.pool.tensor(b, send)
        out.copy_(send)
        works = [dist.isend(out, peer), dist.irecv(inp, peer)]
        for w in works:
            if w is not None:
                w.wait()
        res = inp.clone()
        for s in (a, b):
            self.pool.put_slot(s)
        return res

    def broadcast(self, t: torch.Tensor, src: int = 0) -> torch.Tensor:
        idx = self.pool.get_slot()  # leak: the handler logs and falls back, the slot stays marked
        if idx < 0:
            dist.broadcast(t, src, group=self.group)
            return t
        try:
            staged = self.pool.tensor(idx, t)
            if not t.is_contiguous():
                raise ValueError("tensor is not contiguous")
            staged.copy_(t)
            dist.broadcast(staged, src, group=self.group)
            t.copy_(staged)
            self.pool.put_slot(idx)
        except ValueError as exc:
            LOG.warning("broadcast fell back: %s", exc)
            dist.broadcast(t, src, group=self.group)
        return t
