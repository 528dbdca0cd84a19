"""Gradient bucketing with flat communication buffers."""
from __future__ import annotations

import logging
from typing import Callable, Iterable, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)


class FlatBufferPool:
    def __init__(self, numel: int, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.numel = numel
        self._free: List[Tensor] = [torch.zeros(numel, dtype=dtype) for _ in range(count)]

    def acquire(self) -> Tensor:
        if not self._free:
            raise RuntimeError("no communication buffer left")
        return self._free.pop()

    def release(self, buf: Tensor) -> None:
        self._free.append(buf)


class GradReducer:
    def __init__(self, params: Iterable[torch.nn.Parameter], pool: FlatBufferPool, world_size: int = 1) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.pool = pool
        self.world_size = world_size
        self._inflight: List[tuple] = []
        self._hooks: List[Callable[[Tensor], None]] = []

    def _pack(self, grads: Sequence[Tensor], buf: Tensor) -> int:
        offset = 0
        for g in grads:
            n = g.numel()
            buf[offset:offset + n].copy_(g.reshape(-1))
            offset += n
        return offset

    def _unpack(self, grads: Sequence[Tensor], buf: Tensor) -> None:
        offset = 0
        for g in grads:
            n = g.numel()
            g.copy_(buf[offset:offset + n].view_as(g))
            offset += n

    def _grads(self) -> List[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def reduce_sync(self) -> None:
        grads = self._grads()
        if not grads:
            return
        buf = self.pool.acquire()  # clean: released at the end of the only path
        used = self._pack(grads, buf)
        flat = buf[:used]
        if self.world_size > 1:
            dist.all_reduce(flat)
        flat.div_(self.world_size)
        self._unpack(grads, flat)
        self.pool.release(buf)

    def reduce_mean(self) -> None:
        grads = self._grads()
        buf = self.pool.acquire()  # leak: the division rebinds buf, and the new tensor is released instead
        self._pack(grads, buf)
        if self.world_size > 1:
            dist.all_reduce(buf)
        buf = buf / self.world_size
        self._unpack(grads, buf)
        self.pool.release(buf)

    def reduce_async(self) -> None:
        grads = self._grads()
        buf = self.pool.acquire()  # clean: kept in _inflight until wait_all releases it
        used = self._pack(grads, buf)
        work = dist.all_reduce(buf[:used], async_op=True)
        self._inflight.append((work, buf, grads))

    def wait_all(self) -> None:
        for work, buf, grads in self._inflight:
            work.wait()
            buf /= self.world_size
            self._unpack(grads, buf)
            self.pool.release(buf)
        self._inflight.clear()

    def grad_norm(self) -> float:
        grads = self._grads()
        buf = self.pool.acquire()  # leak: the return for an empty gradient list forgets it
        if not grads:
            return 0.0
        used = self._pack(grads, buf)
        norm = buf[:used].norm().item()
        self.pool.release(buf)
        return norm

    def has_overflow(self) -> bool:
        buf = self.pool.acquire()  # clean: near miss, both returns come after the finally
        try:
            used = self._pack(self._grads(), buf)
            if not torch.isfinite(buf[:used]).all():
                return True
            return False
        finally:
            self.pool.release(buf)

    def broadcast_params(self, src: int = 0) -> None:
        for p in self.params:
            if p.numel() > self.pool.numel:
                logger.warning("parameter too large for the flat buffer, sent directly")
                dist.broadcast(p.data, src)
                continue
            buf = self.pool.acquire()  # clean: near miss, the continue comes before it is taken
            flat = buf.narrow(0, 0, p.numel())
            flat.copy_(p.data.reshape(-1))
            dist.broadcast(flat, src)
            p.data.copy_(flat.view_as(p.data))
            self.pool.release(buf)

    def compress(self, k: int) -> Optional[Tensor]:
        grads = self._grads()
        values = self.pool.acquire()  # clean: released before either return
        index = self.pool.acquire()  # leak: only released when the top-k was long enough
        used = self._pack(grads, values)
        top, where = values[:used].abs().topk(min(k, used))
        index[:top.numel()].copy_(where)
        self.pool.release(values)
        if top.numel() < k:
            return None
        result = index[:k].long().clone()
        self.pool.release(index)
        return result
