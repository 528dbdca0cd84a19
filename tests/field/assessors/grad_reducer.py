"""Bucketed gradient reduction with side streams and pooled communication buffers."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, Optional

import torch
import torch.distributed as dist


class CommBuffers:
    def __init__(self, count: int, numel: int, device: torch.device) -> None:
        self.numel = numel
        self._idle = [torch.empty(numel, device=device) for _ in range(count)]

    def lease(self) -> Optional[torch.Tensor]:
        return self._idle.pop() if self._idle else None

    def unlease(self, buf: torch.Tensor) -> None:
        self._idle.append(buf)


class StreamPool:
    def __init__(self, n: int, device: torch.device) -> None:
        self._idle = [torch.cuda.Stream(device) for _ in range(n)]
        self._default = torch.cuda.current_stream(device)

    def get(self) -> torch.cuda.Stream:
        if self._idle:
            return self._idle.pop()
        return self._default

    def put(self, s: torch.cuda.Stream) -> None:
        if s is not self._default:
            self._idle.append(s)


class EventPool:
    def __init__(self) -> None:
        self._idle: list[torch.cuda.Event] = []
        self.outstanding = 0

    def fetch(self) -> torch.cuda.Event:
        self.outstanding += 1
        return self._idle.pop() if self._idle else torch.cuda.Event()

    def recycle(self, ev: torch.cuda.Event) -> None:
        self.outstanding -= 1
        self._idle.append(ev)


@dataclass
class Bucket:
    index: int
    params: list[torch.nn.Parameter]
    ready: set[int] = field(default_factory=set)
    flat: Optional[torch.Tensor] = None
    stream: Optional[torch.cuda.Stream] = None
    done: Optional[torch.cuda.Event] = None

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.params)


class GradReducer:
    def __init__(self, buckets: list[Bucket], bufs: CommBuffers, streams: StreamPool, events: EventPool, group: dist.ProcessGroup) -> None:
        self.buckets = buckets
        self.bufs = bufs
        self.streams = streams
        self.events = events
        self.group = group
        self._launched: list[Bucket] = []
        self._trace: list[tuple[str, torch.cuda.Event]] = []

    def mark_ready(self, b: Bucket, i: int) -> None:
        b.ready.add(i)
        if len(b.ready) == len(b.params):
            self._launch(b)

    def _launch(self, b: Bucket) -> None:
        flat = self.bufs.lease()  # clean: near miss, stays in the bucket and finish unleases it
        if flat is None:
            self._reduce_inline(b)
            return
        stream = self.streams.get()  # clean: kept in the bucket, finish puts it back
        offset = 0
        for p in b.params:
            flat[offset : offset + p.numel()].copy_(p.grad.view(-1))
            offset += p.numel()
        with torch.cuda.stream(stream):
            dist.all_reduce(flat[:offset], group=self.group)
        b.flat, b.stream = flat, stream
        b.done = self.events.fetch()  # leak: finish clears b.done without recycling the event
        b.done.record(stream)
        self._launched.append(b)

    def _reduce_inline(self, b: Bucket) -> None:
        for p in b.params:
            dist.all_reduce(p.grad, group=self.group)

    def finish(self) -> None:
        for b in self._launched:
            b.done.synchronize()
            offset = 0
            for p in b.params:
                p.grad.view(-1).copy_(b.flat[offset : offset + p.numel()])
                offset += p.numel()
            self.bufs.unlease(b.flat)
            self.streams.put(b.stream)
            b.flat = b.stream = b.done = None
            b.ready.clear()
        self._launched.clear()

    def reduce_unused(self, unused: Iterable[torch.nn.Parameter]) -> int:
        buf = self.bufs.lease()  # leak: with nothing to reduce the function returns with the buffer
        if buf is None:
            return -1
        flags = [1.0 if p.grad is None else 0.0 for p in unused]
        if not flags:
            return 0
        view = buf[: len(flags)]
        view.copy_(torch.tensor(flags))
        dist.all_reduce(view, group=self.group)
        n = int((view > 0).sum())
        self.bufs.unlease(buf)
        return n

    def clip(self, max_norm: float) -> float:
        stream = self.streams.get()  # clean: near miss, put back before the test for clipping
        ev = self.events.fetch()  # clean: recycled right after the synchronisation
        with torch.cuda.stream(stream):
            total = torch.stack([p.grad.norm() for b in self.buckets for p in b.params]).norm()
            ev.record(stream)
        ev.synchronize()
        self.events.recycle(ev)
        self.streams.put(stream)
        if total <= max_norm:
            return float(total)
        for b in self.buckets:
            for p in b.params:
                p.grad.mul_(max_norm / total)
        return float(total)

    def mark(self, label: str) -> None:
        ev = self.events.fetch()  # clean: near miss, collected in _trace and recycled by flush_trace
        ev.record()
        self._trace.append((label, ev))

    def flush_trace(self) -> list[str]:
        names = []
        for label, ev in self._trace:
            names.append(label)
            self.events.recycle(ev)
        self._trace.clear()
        return names

    def compressed(self, t: torch.Tensor, codec: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        buf = self.bufs.lease()  # leak: buf is rebound to the encoded tensor, the leased one is lost
        if buf is None:
            dist.all_reduce(t, group=self.group)
            return t
        buf[: t.numel()].copy_(t.view(-1))
        buf = codec(buf[: t.numel()])
        dist.all_reduce(buf, group=self.group)
        return buf.view_as(t)

    def quantized(self, t: torch.Tensor, scale: float) -> torch.Tensor:
        buf = self.bufs.lease()  # clean: near miss, the clone keeps the values and the buffer is unleased
        if buf is None:
            return t
        view = buf[: t.numel()]
        view.copy_(t.view(-1)).mul_(1.0 / scale)
        dist.all_reduce(view, group=self.group)
        out = view.mul_(scale).view_as(t).clone()
        self.bufs.unlease(buf)
        return out

    def overlap(self, fns: list[Callable[[], None]]) -> None:
        used: list[torch.cuda.Stream] = []
        for fn in fns:
            s = self.streams.get()  # clean: near miss, all of used is put back after the loop
            used.append(s)
            with torch.cuda.stream(s):
                fn()
        for s in used:
            s.synchronize()
            self.streams.put(s)

    def overlap_first_error(self, fns: list[Callable[[], bool]]) -> Optional[int]:
        for i, fn in enumerate(fns):
            s = self.streams.get()  # leak: the first failing function returns before its stream is put back
            with torch.cuda.stream(s):
                ok = fn()
            if not ok:
                return i
            self.streams.put(s)
        return None
