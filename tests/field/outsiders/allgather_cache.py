"""Tensor-parallel communication with optional registered (symmetric memory) buffers."""
from __future__ import annotations

import os
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor


class SymmBufferPool:
    """Buffers registered with the communicator. Registration is costly, so they are recycled."""

    def __init__(self, group: Optional["dist.ProcessGroup"] = None) -> None:
        self.group = group
        self._pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.live = 0

    def acquire(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        self.live += 1
        bucket = self._pool.get((shape, dtype), [])
        return bucket.pop() if bucket else torch.empty(shape, dtype=dtype)

    def release(self, t: Tensor) -> None:
        self.live -= 1
        self._pool.setdefault((t.shape, t.dtype), []).append(t)


class TPCommunicator:
    def __init__(self, world: int, pool: Optional[SymmBufferPool] = None) -> None:
        self.world = world
        self.pool = pool
        self.use_pool = pool is not None and os.environ.get("TP_USE_POOL", "1") == "1"
        self._staged: Optional[Tensor] = None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            buf = self.pool.acquire(x.shape, x.dtype)  # clean: near miss, both tests ask for the same pool
        else:
            buf = torch.empty_like(x)
        buf.copy_(x)
        dist.all_reduce(buf)
        out = buf.clone()
        if self.pool is not None:
            self.pool.release(buf)
        return out

    def all_reduce_bias(self, x: Tensor, bias: Optional[Tensor]) -> Tensor:
        if self.pool is None:
            dist.all_reduce(x)
            return x if bias is None else x + bias
        buf = self.pool.acquire(x.shape, x.dtype)  # leak: with a bias the sum is returned and the buffer forgotten
        buf.copy_(x)
        dist.all_reduce(buf)
        if bias is not None:
            return buf + bias
        out = buf.clone()
        self.pool.release(buf)
        return out

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        shape = torch.Size((self.world, *x.shape))
        use_pool = self.use_pool and x.is_contiguous()
        buf = self.pool.acquire(shape, x.dtype) if use_pool else torch.empty(shape, dtype=x.dtype)  # clean: near miss, same flag guards the release
        dist.all_gather_into_tensor(buf, x.contiguous())
        gathered = torch.cat(buf.unbind(0), dim=dim)
        if use_pool:
            self.pool.release(buf)
        return gathered

    def all_gather_rows(self, x: Tensor) -> Tensor:
        shape = torch.Size((self.world * x.shape[0], *x.shape[1:]))
        if self.use_pool:
            buf = self.pool.acquire(shape, x.dtype)  # leak: released only when contiguous input came in
        else:
            buf = torch.empty(shape, dtype=x.dtype)
        dist.all_gather_into_tensor(buf, x.contiguous())
        rows = buf.clone()
        if self.use_pool and x.is_contiguous():
            self.pool.release(buf)
        return rows

    def reduce_scatter(self, x: Tensor) -> Tensor:
        assert self.pool is not None
        inp = self.pool.acquire(x.shape, x.dtype)  # clean: released after the collective
        out = self.pool.acquire(torch.Size((x.shape[0] // self.world, *x.shape[1:])), x.dtype)  # clean: released after the copy
        inp.copy_(x)
        dist.reduce_scatter_tensor(out, inp)
        self.pool.release(inp)
        res = out.clone()
        self.pool.release(out)
        return res

    def reduce_scatter_mean(self, x: Tensor) -> Tensor:
        assert self.pool is not None
        out = self.pool.acquire(torch.Size((x.shape[0] // self.world, *x.shape[1:])), x.dtype)  # leak: float() of a half tensor is a copy and that copy is released
        dist.reduce_scatter_tensor(out, x)
        out = out.float()
        out.div_(self.world)
        res = out.clone()
        self.pool.release(out)
        return res

    def stage(self, x: Tensor) -> None:
        assert self.pool is not None
        self._staged = self.pool.acquire(x.shape, x.dtype)  # leak: with a single rank commit() forgets it
        self._staged.copy_(x)

    def commit(self) -> Optional[Tensor]:
        if self._staged is None:
            return None
        if self.world == 1:
            out, self._staged = self._staged.clone(), None
            return out
        dist.all_reduce(self._staged)
        out = self._staged.clone()
        self.pool.release(self._staged)
        self._staged = None
        return out


class PipelineLink(TPCommunicator):
    def __init__(self, world: int, pool: SymmBufferPool, next_rank: int, prev_rank: int) -> None:
        super().__init__(world, pool)
        self.next_rank = next_rank
        self.prev_rank = prev_rank

    def recv(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        buf = self.pool.acquire(shape, dtype)  # clean: handed to the caller
        dist.recv(buf, self.prev_rank)
        return buf

    def forward_stage(self, stage: torch.nn.Module, shape: torch.Size) -> None:
        act = self.recv(shape, torch.float32)  # clean: released when the stage has consumed it
        y = stage(act)
        self.pool.release(act)
        dist.send(y, self.next_rank)

    def relay(self, shape: torch.Size, scale: float) -> None:
        act = self.recv(shape, torch.float32)  # clean: near miss, mul_ hands back the same tensor
        act = act.mul_(scale)
        dist.send(act, self.next_rank)
        self.pool.release(act)

    def last_stage(self, stage: torch.nn.Module, shape: torch.Size) -> Tensor:
        return stage(self.recv(shape, torch.float32)).detach().cpu()  # leak: only the module's output leaves
