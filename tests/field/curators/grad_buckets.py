"""Gradient reduction with reusable communication buffers (ZeRO stage 2 style)."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, DefaultDict, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

BufKey = Tuple[int, torch.dtype]


class CommBufferPool:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.out_bytes = 0
        self._idle: DefaultDict[BufKey, List[torch.Tensor]] = defaultdict(list)

    def get(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        idle = self._idle[(numel, dtype)]
        buf = idle.pop() if idle else torch.empty(numel, dtype=dtype)
        self.out_bytes += buf.numel() * buf.element_size()
        return buf

    def get_if_fits(self, numel: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        buf = self.get(numel, dtype)  # clean: near miss, put back when the pool is over its limit
        if self.out_bytes > self.max_bytes:
            self.put(buf)
            return None
        return buf

    def put(self, buf: torch.Tensor) -> None:
        self.out_bytes -= buf.numel() * buf.element_size()
        self._idle[(buf.numel(), buf.dtype)].append(buf)


@dataclass(eq=False)
class Bucket:
    params: List[torch.nn.Parameter] = field(default_factory=list)
    buf: Optional[torch.Tensor] = None
    shadow: Optional[torch.Tensor] = None
    work: Optional[Any] = None

    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class GradReducer:
    def __init__(
        self,
        params: List[torch.nn.Parameter],
        pool: CommBufferPool,
        bucket_numel: int = 1 << 20,
        comm_dtype: Optional[torch.dtype] = None,
        overlap: bool = True,
    ) -> None:
        self.pool = pool
        self.comm_dtype = comm_dtype
        self.overlap = overlap
        self.buckets: List[Bucket] = [Bucket()]
        for p in params:
            if self.buckets[-1].params and self.buckets[-1].numel() + p.numel() > bucket_numel:
                self.buckets.append(Bucket())
            self.buckets[-1].params.append(p)
        self.inflight: List[Bucket] = []
        self.norm_buf: Optional[torch.Tensor] = None

    def _fill(self, bucket: Bucket, out: torch.Tensor) -> bool:
        offset, any_grad = 0, False
        for p in bucket.params:
            view = out[offset : offset + p.numel()]
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad.view(-1))
                any_grad = True
            offset += p.numel()
        return any_grad

    def _scatter_back(self, bucket: Bucket, src: torch.Tensor) -> None:
        offset = 0
        for p in bucket.params:
            if p.grad is not None:
                p.grad.view(-1).copy_(src[offset : offset + p.numel()])
            offset += p.numel()

    def _all_reduce(self, tensor: torch.Tensor, async_op: bool) -> Optional[Any]:
        if not dist.is_initialized():
            return None
        return dist.all_reduce(tensor, async_op=async_op)

    def launch(self, bucket: Bucket) -> None:
        if bucket in self.inflight:
            return
        dtype = bucket.params[0].dtype
        buf = self.pool.get(bucket.numel(), dtype)  # leak: a bucket without gradients returns and forgets the buffer
        if not self._fill(bucket, buf):
            return
        if self.comm_dtype is not None and self.comm_dtype != dtype:
            bucket.shadow = self.pool.get(bucket.numel(), self.comm_dtype)  # clean: near miss, wait puts shadow back when it is set
            bucket.shadow.copy_(buf)
        bucket.buf = buf
        bucket.work = self._all_reduce(bucket.shadow if bucket.shadow is not None else buf, self.overlap)
        self.inflight.append(bucket)

    def wait(self) -> None:
        for bucket in self.inflight:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            assert bucket.buf is not None
            if bucket.shadow is not None:
                bucket.buf.copy_(bucket.shadow)
                self.pool.put(bucket.shadow)
                bucket.shadow = None
            self._scatter_back(bucket, bucket.buf)
            self.pool.put(bucket.buf)
            bucket.buf = None
        self.inflight.clear()

    def reduce_sync(self, bucket: Bucket) -> None:
        buf = self.pool.get(bucket.numel(), bucket.params[0].dtype)  # clean: near miss, put back also for the bucket without gradients
        if not self._fill(bucket, buf):
            self.pool.put(buf)
            return
        self._all_reduce(buf, async_op=False)
        self._scatter_back(bucket, buf)
        self.pool.put(buf)

    def reduce_compressed(self, bucket: Bucket, dtype: torch.dtype) -> bool:
        numel = bucket.numel()
        full = self.pool.get_if_fits(numel, bucket.params[0].dtype)  # leak: lost when the second buffer does not fit
        if full is None:
            return False
        small = self.pool.get_if_fits(numel, dtype)  # clean: near miss, None-checked and put back below
        if small is None:
            return False
        self._fill(bucket, full)
        small.copy_(full)
        self._all_reduce(small, async_op=False)
        full.copy_(small)
        self._scatter_back(bucket, full)
        self.pool.put(small)
        self.pool.put(full)
        return True

    def global_norm(self) -> float:
        if self.norm_buf is None:
            self.norm_buf = self.pool.get(len(self.buckets), torch.float32)  # clean: near miss, kept for all steps and put back in close
        for i, bucket in enumerate(self.buckets):
            norms = [p.grad.norm() for p in bucket.params if p.grad is not None]
            self.norm_buf[i] = torch.stack(norms).norm() if norms else 0.0
        return float(self.norm_buf.norm())

    def flat_copy(self, bucket: Bucket) -> torch.Tensor:
        buf = self.pool.get(bucket.numel(), bucket.params[0].dtype)  # clean: handed on to the caller, who puts it back
        self._fill(bucket, buf)
        return buf

    def snapshot(self) -> Dict[int, torch.Tensor]:
        out: Dict[int, torch.Tensor] = {}
        for i, bucket in enumerate(self.buckets):
            out[i] = self.flat_copy(bucket).clone()  # leak: only the clone is kept, the pooled buffer is dropped
        return out

    def has_overflow(self) -> bool:
        for bucket in self.buckets:
            flat = self.flat_copy(bucket)  # leak: the overflow return comes before the put
            if not torch.isfinite(flat).all():
                return True
            self.pool.put(flat)
        return False

    def max_abs(self) -> float:
        best = 0.0
        for bucket in self.buckets:
            flat = self.flat_copy(bucket)  # clean: near miss, put back before the continue can be reached
            value = float(flat.abs().max()) if flat.numel() else 0.0
            self.pool.put(flat)
            if value == 0.0:
                continue
            best = max(best, value)
        return best

    def close(self) -> None:
        self.wait()
        if self.norm_buf is not None:
            self.pool.put(self.norm_buf)
            self.norm_buf = None
