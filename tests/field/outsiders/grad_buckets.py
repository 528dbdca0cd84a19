"""Gradient bucketing on pooled flat buffers, with optional compression."""
import logging
from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class FlatBufferPool:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._by_size: Dict[int, List[torch.Tensor]] = {}

    def get_buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        stack = self._by_size.setdefault(numel, [])
        for i, cand in enumerate(stack):
            if cand.dtype == dtype:
                return stack.pop(i)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def return_buffer(self, buf: torch.Tensor) -> None:
        self._by_size.setdefault(buf.numel(), []).append(buf)


@dataclass
class Bucket:
    params: List[torch.nn.Parameter]
    flat: torch.Tensor
    work: Optional["dist.Work"] = None


class BucketReducer:
    def __init__(self, pool: FlatBufferPool, world_size: int, compress: bool = False) -> None:
        self.pool = pool
        self.world_size = world_size
        self.compress = compress
        self.pending: List[Bucket] = []

    def _pack(self, params: List[torch.nn.Parameter]) -> torch.Tensor:
        numel = sum(p.numel() for p in params)
        flat = self.pool.get_buffer(numel)  # clean: returned packed to the caller
        offset = 0
        for p in params:
            flat[offset:offset + p.numel()].copy_(p.grad.flatten())
            offset += p.numel()
        return flat

    def _unpack(self, params: Iterable[torch.nn.Parameter], flat: torch.Tensor) -> None:
        offset = 0
        for p in params:
            p.grad.copy_(flat[offset:offset + p.numel()].view_as(p.grad))
            offset += p.numel()

    def reduce_sync(self, params: List[torch.nn.Parameter]) -> None:
        flat = self._pack(params)  # clean: division is in place
        dist.all_reduce(flat)
        flat /= self.world_size
        self._unpack(params, flat)
        self.pool.return_buffer(flat)

    def reduce_mean(self, params: List[torch.nn.Parameter]) -> None:
        flat = self._pack(params)  # leak: the division makes a new tensor and the pooled one is dropped
        dist.all_reduce(flat)
        flat = flat / self.world_size
        self._unpack(params, flat)
        self.pool.return_buffer(flat)

    def reduce_async(self, params: List[torch.nn.Parameter]) -> None:
        flat = self._pack(params)  # clean: kept in pending, flush() returns it
        work = dist.all_reduce(flat, async_op=True)
        self.pending.append(Bucket(params, flat, work))

    def flush(self) -> None:
        for bucket in self.pending:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.flat.div_(self.world_size)
            self._unpack(bucket.params, bucket.flat)
            self.pool.return_buffer(bucket.flat)
        self.pending.clear()

    def reduce_half(self, params: List[torch.nn.Parameter]) -> None:
        flat = self._pack(params)  # clean: near miss, released under its own name although half takes part
        wire = flat
        if self.compress:
            wire = self.pool.get_buffer(flat.numel(), torch.bfloat16)  # clean: near miss, released under the same flag
            wire.copy_(flat)
        dist.all_reduce(wire)
        if self.compress:
            flat.copy_(wire)
            self.pool.return_buffer(wire)
        flat.div_(self.world_size)
        self._unpack(params, flat)
        self.pool.return_buffer(flat)

    def reduce_skip_nonfinite(self, params: List[torch.nn.Parameter]) -> bool:
        flat = self._pack(params)  # leak: an overflowing step returns before the buffer does
        dist.all_reduce(flat)
        if not torch.isfinite(flat).all():
            logger.warning("non-finite gradient, step skipped")
            return False
        flat.mul_(1.0 / self.world_size)
        self._unpack(params, flat)
        self.pool.return_buffer(flat)
        return True

    def grad_norm(self, params: List[torch.nn.Parameter]) -> float:
        return self._pack(params).norm().item()  # leak: only the norm survives

    def broadcast(self, params: List[torch.nn.Parameter], src: int) -> None:
        numel = sum(p.numel() for p in params)
        buf = self.pool.get_buffer(numel)  # clean: views of it do not change who owns it
        views = torch.split(buf, [p.numel() for p in params])
        if dist.get_rank() == src:
            for p, v in zip(params, views):
                v.copy_(p.data.flatten())
        dist.broadcast(buf, src)
        for p, v in zip(params, views):
            p.data.copy_(v.view_as(p))
        self.pool.return_buffer(buf)

    def gather_sizes(self, local: int) -> List[int]:
        send = self.pool.get_buffer(1, torch.int64)  # clean: returned at the end
        recv = self.pool.get_buffer(self.world_size, torch.int64)  # leak: only send goes back
        send.fill_(local)
        dist.all_gather_into_tensor(recv, send)
        sizes = recv.tolist()
        self.pool.return_buffer(send)
        return sizes
