"""Flat gradient buckets reduced through a small set of reusable communication buffers."""
from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Callable, Deque, Dict, Iterable, List, Optional

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class CommBuffer:
    __slots__ = ("index", "data", "tag")

    def __init__(self, index: int, data: torch.Tensor) -> None:
        self.index = index
        self.data = data
        self.tag = ""


class CommBufferPool:
    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: str) -> None:
        self.numel = numel
        self._lock = threading.Lock()
        self._free: Deque[CommBuffer] = deque(
            CommBuffer(i, torch.empty(numel, dtype=dtype, device=device)) for i in range(count)
        )

    def checkout(self, tag: str) -> Optional[CommBuffer]:
        with self._lock:
            if not self._free:
                return None
            buf = self._free.popleft()
        buf.tag = tag
        return buf

    def checkin(self, buf: CommBuffer) -> None:
        buf.tag = ""
        with self._lock:
            self._free.append(buf)


class GradReducer:
    def __init__(self, pool: CommBufferPool, group, world_size: int,
                 on_done: Callable[[int, torch.Tensor], None]) -> None:
        self.pool = pool
        self.group = group
        self.world_size = world_size
        self.on_done = on_done
        self._staged: Dict[int, CommBuffer] = {}
        self._wire: Dict[int, CommBuffer] = {}
        self._inflight: Deque[dict] = deque()

    def stage(self, bucket_id: int, grads: Iterable[torch.Tensor]) -> bool:
        buf = self._staged.get(bucket_id)
        if buf is None:
            buf = self.pool.checkout(f"stage{bucket_id}")  # clean: near miss, kept in _staged, which flush launches and reset checks in
            if buf is None:
                return False
            self._staged[bucket_id] = buf
        offset = 0
        for grad in grads:
            n = grad.numel()
            buf.data[offset:offset + n].copy_(grad.view(-1))
            offset += n
        return True

    def flush(self, bucket_id: int) -> None:
        buf = self._staged.pop(bucket_id, None)
        if buf is None:
            return
        work = dist.all_reduce(buf.data, group=self.group, async_op=True)
        self._inflight.append({"work": work, "buf": buf, "bucket": bucket_id})

    def finalize(self) -> None:
        while self._inflight:
            rec = self._inflight.popleft()
            rec["work"].wait()
            self.on_done(rec["bucket"], rec["buf"].data)
            self.pool.checkin(rec["buf"])

    def reset(self) -> None:
        self.finalize()
        for buf in self._staged.values():
            self.pool.checkin(buf)
        self._staged.clear()
        for bucket_id in list(self._wire):
            self.pool.checkin(self._wire.pop(bucket_id))

    def compress(self, bucket_id: int, residual: torch.Tensor) -> bool:
        wire = self.pool.checkout("wire")  # leak: a second micro-batch of the same bucket overwrites the entry, the earlier buffer is lost
        if wire is None:
            return False
        n = residual.numel()
        wire.data[:n].copy_(torch.sign(residual.view(-1)))
        self._wire[bucket_id] = wire
        return True

    def compress_once(self, bucket_id: int, residual: torch.Tensor) -> bool:
        if bucket_id in self._wire:
            return True
        wire = self.pool.checkout("wire")  # clean: near miss, the entry is known to be empty and reset checks it in
        if wire is None:
            return False
        wire.data[:residual.numel()].copy_(torch.sign(residual.view(-1)))
        self._wire[bucket_id] = wire
        return True

    def reduce_now(self, tensor: torch.Tensor) -> torch.Tensor:
        n = tensor.numel()
        buf = self.pool.checkout("now")  # leak: returns on a single rank without checking the buffer in
        if buf is None:
            dist.all_reduce(tensor, group=self.group)
            return tensor
        buf.data[:n].copy_(tensor.view(-1))
        if self.world_size == 1:
            return tensor
        dist.all_reduce(buf.data[:n], group=self.group)
        tensor.view(-1).copy_(buf.data[:n])
        self.pool.checkin(buf)
        return tensor

    def broadcast_flat(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        n = tensor.numel()
        buf = self.pool.checkout("bcast") if n <= self.pool.numel else None  # clean: near miss, checked in under the same None test that guards its use
        target = tensor.view(-1) if buf is None else buf.data[:n]
        if buf is not None and dist.get_rank() == src:
            target.copy_(tensor.view(-1))
        dist.broadcast(target, src=src, group=self.group)
        if buf is not None:
            tensor.view(-1).copy_(target)
            self.pool.checkin(buf)
        return tensor

    def reduce_sparse(self, indices: torch.Tensor, values: torch.Tensor) -> Optional[torch.Tensor]:
        vbuf = self.pool.checkout("values")  # leak: kept by nobody when no second buffer is free
        if vbuf is None:
            return None
        ibuf = self.pool.checkout("indices")  # clean: None is returned on, otherwise checked in below
        if ibuf is None:
            logger.debug("sparse reduce postponed, pool is dry")
            return None
        vbuf.data[:values.numel()].copy_(values.view(-1))
        ibuf.data[:indices.numel()].copy_(indices.view(-1))
        dist.all_reduce(vbuf.data, group=self.group)
        dist.all_reduce(ibuf.data, group=self.group)
        result = vbuf.data[:values.numel()].clone()
        self.pool.checkin(vbuf)
        self.pool.checkin(ibuf)
        return result

    def gather_stats(self, counts: torch.Tensor, sums: torch.Tensor) -> Optional[List[float]]:
        cbuf = self.pool.checkout("counts")  # clean: near miss, checked in when the second buffer is missing
        if cbuf is None:
            return None
        sbuf = self.pool.checkout("sums")  # clean: checked in after the reduction
        if sbuf is None:
            self.pool.checkin(cbuf)
            return None
        n = counts.numel()
        cbuf.data[:n].copy_(counts)
        sbuf.data[:n].copy_(sums)
        for buf in (cbuf, sbuf):
            dist.all_reduce(buf.data[:n], group=self.group)
        means = (sbuf.data[:n] / cbuf.data[:n].clamp(min=1)).tolist()
        for buf in (cbuf, sbuf):
            self.pool.checkin(buf)
        return means

    def global_norm(self, grads: Dict[str, torch.Tensor]) -> float:
        total = 0.0
        for name, grad in grads.items():
            scratch = self.pool.checkout("norm")  # leak: skipped by continue for a non-finite gradient
            if scratch is None:
                total += float(grad.norm()) ** 2
                continue
            part = scratch.data[:grad.numel()].copy_(grad.view(-1)).pow_(2).sum()
            if not torch.isfinite(part):
                logger.warning("non-finite gradient in %s", name)
                continue
            total += float(part)
            self.pool.checkin(scratch)
        return total ** 0.5

    def max_abs(self, grads: Dict[str, torch.Tensor]) -> float:
        best = 0.0
        for name, grad in grads.items():
            scratch = self.pool.checkout("max")  # clean: near miss, the finally checks in before continue takes effect
            if scratch is None:
                best = max(best, float(grad.abs().max()))
                continue
            try:
                part = scratch.data[:grad.numel()].copy_(grad.view(-1)).abs_().max()
                if not torch.isfinite(part):
                    continue
                best = max(best, float(part))
            finally:
                self.pool.checkin(scratch)
        return best
