"""Gradient bucketing with pooled communication buffers and asynchronous reduce-scatter."""
from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Iterable, Optional

import torch
import torch.distributed as dist


class CommBufferPool:
    def __init__(self, device: torch.device, max_buffers: int) -> None:
        self.device = device
        self.max_buffers = max_buffers
        self.total = 0
        self._idle: dict[tuple[int, torch.dtype], deque[torch.Tensor]] = defaultdict(deque)

    def get(self, numel: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        idle = self._idle[(numel, dtype)]
        if idle:
            return idle.popleft()
        if self.total >= self.max_buffers:
            return None
        self.total += 1
        return torch.empty(numel, dtype=dtype, device=self.device)

    def put(self, buf: torch.Tensor) -> None:
        self._idle[(buf.numel(), buf.dtype)].append(buf)

    def get_zeroed(self, numel: int, dtype: torch.dtype) -> Optional[torch.Tensor]:
        buf = self.get(numel, dtype)  # clean: near miss, zeroed in place and returned to the caller
        return None if buf is None else buf.zero_()

    def get_any(self, numel: int, dtypes: Iterable[torch.dtype]) -> Optional[torch.Tensor]:
        found: Optional[torch.Tensor] = None
        for dtype in dtypes:
            found = self.get(numel, dtype)  # leak: no break, a later dtype overwrites a buffer already found
        return found


@dataclass
class Bucket:
    index: int
    params: list[torch.nn.Parameter]
    numel: int
    buf: Optional[torch.Tensor] = None
    shard: Optional[torch.Tensor] = None
    ready: int = 0


@dataclass
class Inflight:
    bucket: Bucket
    work: Any


class BucketReducer:
    def __init__(self, buckets: list[Bucket], pool: CommBufferPool, group: Optional[Any] = None) -> None:
        self.buckets = buckets
        self.pool = pool
        self.group = group
        self.world = dist.get_world_size(group)
        self.inflight: deque[Inflight] = deque()
        self.residual: Optional[torch.Tensor] = None
        self.skip_sync = False

    def _ensure(self, bucket: Bucket) -> torch.Tensor:
        if bucket.buf is None:
            buf = self.pool.get(bucket.numel, torch.float32)  # clean: near miss, kept in the bucket until _retire
            while buf is None:
                self._retire(self.inflight.popleft())
                buf = self.pool.get(bucket.numel, torch.float32)  # clean: near miss, only retried after None
            bucket.buf = buf
        return bucket.buf

    def on_grad(self, bucket: Bucket, p: torch.nn.Parameter, offset: int) -> None:
        buf = self._ensure(bucket)
        assert p.grad is not None
        buf[offset : offset + p.numel()].copy_(p.grad.view(-1))
        p.grad = None
        bucket.ready += 1
        if bucket.ready == len(bucket.params):
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.ready = 0
        bucket.shard = self.pool.get(bucket.numel // self.world, torch.float32)  # leak: skip_sync returns here and the next launch overwrites the shard
        if self.skip_sync or bucket.shard is None:
            return
        work = dist.reduce_scatter_tensor(bucket.shard, bucket.buf, group=self.group, async_op=True)
        self.inflight.append(Inflight(bucket, work))

    def _retire(self, item: Inflight) -> None:
        item.work.wait()
        bucket = item.bucket
        if bucket.buf is not None:
            self.pool.put(bucket.buf)
            bucket.buf = None
        if bucket.shard is not None:
            bucket.params[0].grad = bucket.shard.clone()
            self.pool.put(bucket.shard)
            bucket.shard = None

    def finish(self) -> None:
        while self.inflight:
            self._retire(self.inflight.popleft())
        for bucket in self.buckets:
            if bucket.buf is not None and not self.skip_sync:
                self.pool.put(bucket.buf)
                bucket.buf = None

    def grad_norm(self) -> float:
        acc = self.pool.get_zeroed(1, torch.float32)  # clean: near miss, put back before both ways out
        if acc is None:
            return -1.0
        for bucket in self.buckets:
            if bucket.buf is not None:
                acc += bucket.buf.pow(2).sum()
        value = float(acc.item())
        self.pool.put(acc)
        if value != value:
            return float("inf")
        return value ** 0.5

    def compress(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed = self.pool.get(flat.numel(), torch.bfloat16)  # clean: returned with its residual
        if packed is None:
            packed = torch.empty(flat.numel(), dtype=torch.bfloat16, device=flat.device)
        packed.copy_(flat)
        if self.residual is not None:
            packed += self.residual.to(torch.bfloat16)
        return packed, flat - packed.float()

    def all_reduce_compressed(self, flat: torch.Tensor) -> torch.Tensor:
        packed, self.residual = self.compress(flat)  # leak: the pooled half is copied to float and dropped
        dist.all_reduce(packed, group=self.group)
        return packed.float() / self.world

    def broadcast(self, tensors: list[torch.Tensor], src: int) -> None:
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for t in tensors:
            if not t.is_floating_point():
                dist.broadcast(t, src, group=self.group)
                continue
            buf = self.pool.get(t.numel(), t.dtype)  # clean: near miss, the second loop gives back all that was staged
            if buf is None:
                dist.broadcast(t, src, group=self.group)
                continue
            buf.copy_(t.view(-1))
            staged.append((t, buf))
        for t, buf in staged:
            dist.broadcast(buf, src, group=self.group)
            t.copy_(buf.view_as(t))
            self.pool.put(buf)

    def gather_lengths(self, local: int) -> list[int]:
        mine = self.pool.get(1, torch.int64)  # leak: a refused output buffer returns without giving this one back
        out = self.pool.get(self.world, torch.int64)  # clean: near miss, either None or put back after the gather
        if mine is None or out is None:
            if out is not None:
                self.pool.put(out)
            return [local] * self.world
        mine.fill_(local)
        dist.all_gather_into_tensor(out, mine, group=self.group)
        lengths = out.tolist()
        self.pool.put(mine)
        self.pool.put(out)
        return lengths

    def barrier_probe(self) -> bool:
        token = self.pool.get_any(1, (torch.int32, torch.int64))  # clean: put back after the all-reduce
        if token is None:
            return False
        token.fill_(1)
        dist.all_reduce(token, group=self.group)
        ok = int(token.item()) == self.world
        self.pool.put(token)
        return ok
