"""Bucketed gradient reduction with reusable communication buffers."""
from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator, Optional, Sequence

import torch
import torch.distributed as dist


@dataclass
class CommBuffer:
    ident: int
    data: torch.Tensor
    used: int = 0


class CommBufferArena:
    """Fixed-size flat buffers, all of one dtype, living on the device."""

    def __init__(self, numel: int, depth: int, device: torch.device) -> None:
        self.numel = numel
        self._idle: deque[CommBuffer] = deque(
            CommBuffer(i, torch.empty(numel, dtype=torch.bfloat16, device=device)) for i in range(depth)
        )
        self._out: dict[int, CommBuffer] = {}
        self._poisoned: set[int] = set()

    def checkout(self) -> Optional[CommBuffer]:
        if not self._idle:
            return None
        buf = self._idle.popleft()
        buf.used = 0
        self._out[buf.ident] = buf
        return buf

    def checkout_sized(self, numel: int) -> Optional[CommBuffer]:
        if not self._idle:
            return None
        buf = self._idle.popleft()  # leak: the buffer is in neither list when the request is too large
        if numel > buf.data.numel():
            return None
        buf.used = numel
        self._out[buf.ident] = buf
        return buf

    def checkout_healthy(self) -> Optional[CommBuffer]:
        for _ in range(len(self._idle)):
            buf = self._idle.popleft()  # clean: near miss, a poisoned one goes to the back of the idle queue
            if buf.ident in self._poisoned:
                self._idle.append(buf)
                continue
            self._out[buf.ident] = buf
            return buf
        return None

    def retire(self, buf: CommBuffer) -> None:
        self._out.pop(buf.ident)
        self._idle.append(buf)

    @contextmanager
    def scratch(self) -> Iterator[Optional[CommBuffer]]:
        buf = self.checkout()  # clean: near miss, retired in finally unless there was none
        try:
            yield buf
        finally:
            if buf is not None:
                self.retire(buf)


@dataclass
class InflightReduce:
    buf: CommBuffer
    work: "dist.Work"
    params: Sequence[torch.nn.Parameter]


class BucketReducer:
    def __init__(self, arena: CommBufferArena, group: "dist.ProcessGroup", overlap: bool) -> None:
        self.arena = arena
        self.group = group
        self.overlap = overlap
        self.inflight: list[InflightReduce] = []
        self.open_bucket: Optional[CommBuffer] = None
        self.open_params: list[torch.nn.Parameter] = []

    def add_grad(self, param: torch.nn.Parameter) -> bool:
        numel = param.numel()
        if self.open_bucket is not None and self.open_bucket.used + numel > self.arena.numel:
            self.dispatch()
        if self.open_bucket is None:
            self.open_bucket = self.arena.checkout()  # clean: near miss, dispatch moves it to inflight before the field is filled again
            if self.open_bucket is None:
                return False
        start = self.open_bucket.used
        self.open_bucket.data[start : start + numel].copy_(param.grad.view(-1))
        self.open_bucket.used += numel
        self.open_params.append(param)
        return True

    def dispatch(self) -> None:
        if self.open_bucket is None:
            return
        buf, self.open_bucket = self.open_bucket, None
        params, self.open_params = self.open_params, []
        work = dist.all_reduce(buf.data[: buf.used], group=self.group, async_op=True)
        self.inflight.append(InflightReduce(buf, work, params))

    def finish(self) -> None:
        self.dispatch()
        for item in self.inflight:
            item.work.wait()
            self._scatter_back(item)
            self.arena.retire(item.buf)
        self.inflight.clear()

    def _scatter_back(self, item: InflightReduce) -> None:
        offset = 0
        for param in item.params:
            numel = param.numel()
            param.grad.view(-1).copy_(item.buf.data[offset : offset + numel])
            offset += numel

    def reduce_large(self, param: torch.nn.Parameter) -> bool:
        buf = self.arena.checkout_sized(param.numel())  # leak: retired only with overlap off
        if buf is None:
            return False
        buf.data[: buf.used].copy_(param.grad.view(-1))
        work = dist.all_reduce(buf.data[: buf.used], group=self.group, async_op=self.overlap)
        if self.overlap:
            work.wait()
            param.grad.view(-1).copy_(buf.data[: buf.used])
        else:
            param.grad.view(-1).copy_(buf.data[: buf.used])
            self.arena.retire(buf)
        return True

    def reduce_embedding_pair(self, first: torch.nn.Parameter, last: torch.nn.Parameter) -> bool:
        head = self.arena.checkout()  # leak: not retired when the second checkout finds the arena empty
        if head is None:
            return False
        tail = self.arena.checkout()  # clean: retired in the loop below
        if tail is None:
            return False
        for param, buf in ((first, head), (last, tail)):
            buf.data[: param.numel()].copy_(param.grad.view(-1))
            dist.all_reduce(buf.data[: param.numel()], group=self.group)
            self.arena.retire(buf)
        return True

    def reduce_layernorms(self, params: Sequence[torch.nn.Parameter]) -> int:
        reduced = 0
        buf = self.arena.checkout_healthy()  # clean: near miss, retired after the loop however it ends
        if buf is None:
            return 0
        for param in params:
            if param.grad is None:
                continue
            if param.numel() > self.arena.numel:
                break
            view = buf.data[: param.numel()]
            view.copy_(param.grad.view(-1))
            dist.all_reduce(view, group=self.group)
            param.grad.view(-1).copy_(view)
            reduced += 1
        self.arena.retire(buf)
        return reduced

    def global_norm(self, params: Sequence[torch.nn.Parameter]) -> float:
        with self.arena.scratch() as buf:  # clean: the context manager retires it
            if buf is None:
                return 0.0
            for i, param in enumerate(params):
                buf.data[i] = param.grad.norm()
            return float(buf.data[: len(params)].norm())

    def broadcast_weights(self, params: Sequence[torch.nn.Parameter], src: int) -> bool:
        buf: Optional[CommBuffer] = None
        for param in params:
            buf = self.arena.checkout()  # leak: each turn overwrites the buffer of the turn before, only the last is retired
            if buf is None:
                return False
            view = buf.data[: param.numel()]
            view.copy_(param.data.view(-1))
            dist.broadcast(view, src=src, group=self.group)
            param.data.view(-1).copy_(view)
        if buf is not None:
            self.arena.retire(buf)
        return True
