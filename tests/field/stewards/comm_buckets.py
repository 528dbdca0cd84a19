from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
import torch.distributed as dist
from torch import nn


class StreamPool:
    def __init__(self, n: int) -> None:
        self._idle: deque[torch.cuda.Stream] = deque(torch.cuda.Stream() for _ in range(n))

    def get(self) -> Optional[torch.cuda.Stream]:
        return self._idle.popleft() if self._idle else None

    def put(self, stream: torch.cuda.Stream) -> None:
        self._idle.append(stream)


@dataclass(eq=False)
class CommBuffer:
    data: torch.Tensor
    dtype: torch.dtype


class CommBufferPool:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._idle: dict[torch.dtype, list[CommBuffer]] = defaultdict(list)

    def get(self, dtype: torch.dtype) -> CommBuffer:
        if self._idle[dtype]:
            return self._idle[dtype].pop()
        return CommBuffer(torch.empty(self.numel, dtype=dtype, device="cuda"), dtype)

    def put(self, buf: CommBuffer) -> None:
        self._idle[buf.dtype].append(buf)

    def get_clean(self, dtype: torch.dtype, tries: int = 4) -> CommBuffer:
        for _ in range(tries):
            buf = self.get(dtype)  # leak: a buffer found with NaNs is neither kept nor put back
            if not torch.isnan(buf.data).any():
                return buf
        return self.get(dtype)  # clean: goes to the caller


@dataclass
class Bucket:
    index: int
    params: list[nn.Parameter] = field(default_factory=list)
    pending: int = 0
    buffer: Optional[CommBuffer] = None
    stream: Optional[torch.cuda.Stream] = None
    work: Optional[dist.Work] = None


class BucketReducer:
    def __init__(self, module: nn.Module, pool: CommBufferPool, streams: StreamPool, cap: int) -> None:
        self.pool = pool
        self.streams = streams
        self.buckets: list[Bucket] = []
        self._norm_buffer: Optional[CommBuffer] = None
        current, size = Bucket(0), 0
        for p in module.parameters():
            if size + p.numel() > cap and current.params:
                self.buckets.append(current)
                current, size = Bucket(len(self.buckets)), 0
            current.params.append(p)
            size += p.numel()
        self.buckets.append(current)
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_hook(functools.partial(self._on_grad, bucket))

    def prepare(self) -> None:
        for bucket in self.buckets:
            bucket.pending = len(bucket.params)
        self._norm_buffer = self.pool.get(torch.float32)  # leak: finalize() forgets it and the next step takes another

    def _on_grad(self, bucket: Bucket, grad: torch.Tensor) -> torch.Tensor:
        bucket.pending -= 1
        if bucket.pending == 0:
            self._launch(bucket)
        return grad

    def _launch(self, bucket: Bucket) -> None:
        bucket.buffer = self.pool.get(bucket.params[0].dtype)  # clean: near miss, one launch a step, put back by finalize()
        bucket.stream = self.streams.get()  # clean: put back by finalize() where there was one
        flat = torch.cat([p.grad.flatten() for p in bucket.params if p.grad is not None])
        bucket.buffer.data[:flat.numel()].copy_(flat)
        if bucket.stream is None:
            bucket.work = dist.all_reduce(bucket.buffer.data, async_op=True)
            return
        with torch.cuda.stream(bucket.stream):
            bucket.work = dist.all_reduce(bucket.buffer.data, async_op=True)

    def finalize(self) -> None:
        for bucket in self.buckets:
            if bucket.buffer is None:
                continue
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            at = 0
            for p in bucket.params:
                if p.grad is None:
                    continue
                p.grad.copy_(bucket.buffer.data[at:at + p.numel()].view_as(p))
                at += p.numel()
            self.pool.put(bucket.buffer)
            bucket.buffer = None
            if bucket.stream is not None:
                self.streams.put(bucket.stream)
                bucket.stream = None
        if self._norm_buffer is not None:
            self._norm_buffer.data.zero_()


def broadcast_params(module: nn.Module, pool: CommBufferPool, src: int = 0) -> int:
    sent = 0
    for p in module.parameters():
        buf = pool.get(p.dtype)  # leak: frozen parameters continue before the put
        if not p.requires_grad:
            continue
        view = buf.data[:p.numel()]
        view.copy_(p.detach().flatten())
        dist.broadcast(view, src)
        p.data.copy_(view.view_as(p))
        pool.put(buf)
        sent += p.numel()
    return sent


def gather_scalars(values: list[float], pool: CommBufferPool) -> list[float]:
    buf = pool.get(torch.float32)  # clean: near miss, the single-rank return comes after a put of its own
    if dist.get_world_size() == 1:
        pool.put(buf)
        return values
    buf.data[:len(values)].copy_(torch.tensor(values))
    dist.all_reduce(buf.data[:len(values)])
    out = buf.data[:len(values)].tolist()
    pool.put(buf)
    return out


def overlap(chunks: list[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor], streams: StreamPool) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    used: list[torch.cuda.Stream] = []
    for chunk in chunks:
        stream = streams.get()  # clean: near miss, collected in used and all put back at the end
        if stream is None:
            out.append(fn(chunk))
            continue
        used.append(stream)
        with torch.cuda.stream(stream):
            out.append(fn(chunk))
    for stream in used:
        stream.synchronize()
        streams.put(stream)
    return out


def overlap_pairs(chunks: list[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor], streams: StreamPool) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    by_shape: dict[torch.Size, torch.cuda.Stream] = {}
    for chunk in chunks:
        stream = streams.get()  # leak: chunks of one shape overwrite each other's stream in the dict
        if stream is None:
            out.append(fn(chunk))
            continue
        by_shape[chunk.shape] = stream
        with torch.cuda.stream(stream):
            out.append(fn(chunk))
    for stream in by_shape.values():
        stream.synchronize()
        streams.put(stream)
    return out


def clip_grads(params: list[nn.Parameter], max_norm: float, pool: CommBufferPool) -> float:
    buf = pool.get_clean(torch.float32)  # clean: put back on both ways below
    buf.data[0] = sum(float(p.grad.norm()) ** 2 for p in params if p.grad is not None)
    dist.all_reduce(buf.data[:1])
    norm = float(buf.data[0]) ** 0.5
    if norm <= max_norm:
        pool.put(buf)
        return norm
    for p in params:
        if p.grad is not None:
            p.grad.mul_(max_norm / (norm + 1e-6))
    pool.put(buf)
    return norm
