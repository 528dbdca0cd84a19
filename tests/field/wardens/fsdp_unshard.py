from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Iterable, Optional, Sequence

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class GatherBuffer:
    index: int
    data: torch.Tensor
    in_use: bool = False


class GatherBufferPool:
    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._free: deque[GatherBuffer] = deque(
            GatherBuffer(i, torch.empty(numel, dtype=dtype, device=device)) for i in range(count)
        )

    def acquire(self) -> GatherBuffer:
        if not self._free:
            raise RuntimeError("all-gather buffers exhausted")
        buf = self._free.popleft()
        buf.in_use = True
        return buf

    def try_acquire(self, numel: int) -> Optional[GatherBuffer]:
        if numel > self.numel or not self._free:
            return None
        return self.acquire()  # clean: handed to the caller

    def release(self, buf: GatherBuffer) -> None:
        buf.in_use = False
        self._free.append(buf)


class FlatParamHandle:
    def __init__(self, name: str, shard: torch.Tensor, pool: GatherBufferPool,
                 group: dist.ProcessGroup) -> None:
        self.name = name
        self.shard = shard
        self.pool = pool
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.padded_numel = shard.numel() * self.world_size
        self.grad_shard: Optional[torch.Tensor] = None
        self._full: Optional[GatherBuffer] = None
        self._pending: Optional[tuple[GatherBuffer, dist.Work]] = None

    def _view(self, buf: GatherBuffer) -> torch.Tensor:
        return buf.data[: self.padded_numel]

    def unshard(self) -> torch.Tensor:
        if self._pending is not None:
            self._full, work = self._pending
            self._pending = None
            work.wait()
        elif self._full is None:
            self._full = self.pool.acquire()  # clean: near miss, filled only when empty, reshard and reset give it back
            dist.all_gather_into_tensor(self._view(self._full), self.shard, group=self.group)
        return self._view(self._full)

    def prefetch(self) -> bool:
        if self._full is not None or self._pending is not None:
            return False
        buf = self.pool.try_acquire(self.padded_numel)  # leak: reset() clears _pending without returning the buffer
        if buf is None:
            return False
        work = dist.all_gather_into_tensor(self._view(buf), self.shard, group=self.group, async_op=True)
        self._pending = (buf, work)
        return True

    def reshard(self) -> None:
        if self._full is None:
            return
        self.pool.release(self._full)
        self._full = None

    def reset(self) -> None:
        self.reshard()
        self._pending = None
        self.grad_shard = None

    def reduce_grad(self, grad: torch.Tensor) -> Optional[torch.Tensor]:
        buf = self.pool.acquire()  # leak: the non-finite return keeps the buffer out of the pool
        view = self._view(buf)
        view.zero_()
        view[: grad.numel()].copy_(grad.reshape(-1))
        if not torch.isfinite(view).all():
            logger.warning("skipping non-finite gradient of %s", self.name)
            return None
        out = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(out, view, group=self.group)
        self.pool.release(buf)
        return out


class GradReducer:
    def __init__(self, pool: GatherBufferPool, group: dist.ProcessGroup) -> None:
        self.pool = pool
        self.group = group
        self._inflight: list[tuple[GatherBuffer, dist.Work]] = []

    def launch(self, handle: FlatParamHandle, grad: torch.Tensor) -> None:
        buf = self.pool.acquire()  # clean: near miss, released at once for one rank, else drained by wait_all
        view = buf.data[: handle.padded_numel]
        view[: grad.numel()].copy_(grad.reshape(-1))
        if handle.world_size == 1:
            handle.grad_shard = view.clone()
            self.pool.release(buf)
            return
        handle.grad_shard = torch.empty_like(handle.shard)
        work = dist.reduce_scatter_tensor(handle.grad_shard, view, group=self.group, async_op=True)
        self._inflight.append((buf, work))

    def wait_all(self) -> None:
        while self._inflight:
            buf, work = self._inflight.pop()
            work.wait()
            self.pool.release(buf)

    def total_norm(self, grads: Sequence[torch.Tensor]) -> float:
        scratch = self.pool.acquire()  # clean: near miss, early return runs through finally
        try:
            if not grads:
                return 0.0
            for i, grad in enumerate(grads):
                scratch.data[i] = grad.norm()
            total = scratch.data[: len(grads)].square().sum()
            dist.all_reduce(total, group=self.group)
            return float(total.sqrt())
        finally:
            self.pool.release(scratch)


def gather_state_dict(handles: Iterable[FlatParamHandle], pool: GatherBufferPool,
                      rank0_only: bool = True) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for handle in handles:
        buf = pool.acquire()  # leak: ranks other than 0 continue past the release
        view = buf.data[: handle.padded_numel]
        dist.all_gather_into_tensor(view, handle.shard, group=handle.group)
        if rank0_only and dist.get_rank(handle.group) != 0:
            continue
        state[handle.name] = view.cpu()
        pool.release(buf)
    return state


def max_divergence(a: FlatParamHandle, b: FlatParamHandle, pool: GatherBufferPool) -> Optional[float]:
    first = pool.try_acquire(a.padded_numel)  # leak: not returned when the second buffer is refused
    if first is None:
        return None
    second = pool.try_acquire(b.padded_numel)  # clean: near miss, nothing held when refused, released below
    if second is None:
        return None
    dist.all_gather_into_tensor(first.data[: a.padded_numel], a.shard, group=a.group)
    dist.all_gather_into_tensor(second.data[: b.padded_numel], b.shard, group=b.group)
    numel = min(a.padded_numel, b.padded_numel)
    diff = float((first.data[:numel] - second.data[:numel]).abs().max())
    pool.release(second)
    pool.release(first)
    return diff


class ShardedStack:
    def __init__(self, handles: Sequence[FlatParamHandle], pool: GatherBufferPool,
                 reducer: GradReducer) -> None:
        self.handles = list(handles)
        self.pool = pool
        self.reducer = reducer

    def forward(self, x: torch.Tensor, limit: Optional[int] = None) -> torch.Tensor:
        for i, handle in enumerate(self.handles):
            weight = handle.unshard()
            if i + 1 < len(self.handles):
                self.handles[i + 1].prefetch()
            x = torch.relu(x * weight[: x.numel()].view_as(x))
            handle.reshard()
            if limit is not None and i + 1 >= limit:
                break
        return x

    def finish_step(self, grads: dict[str, torch.Tensor]) -> float:
        for handle in self.handles:
            self.reducer.launch(handle, grads[handle.name])
        self.reducer.wait_all()
        norm = self.reducer.total_norm([h.grad_shard for h in self.handles if h.grad_shard is not None])
        for handle in self.handles:
            handle.reset()
        return norm
