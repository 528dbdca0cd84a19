"""Host/device copy engine on top of a pinned arena and a small bank of streams."""
from __future__ import annotations

import bisect
import typing as t
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Span:
    offset: int
    nbytes: int


class PinnedArena:
    """First-fit arena; spans are merged with their neighbours when freed."""

    def __init__(self, nbytes: int, align: int = 256):
        self.base = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.align = align
        self._holes: t.List[t.Tuple[int, int]] = [(0, nbytes)]

    def alloc(self, nbytes: int) -> t.Optional[Span]:
        need = -(-nbytes // self.align) * self.align
        for i, (off, size) in enumerate(self._holes):
            if size >= need:
                if size == need:
                    del self._holes[i]
                else:
                    self._holes[i] = (off + need, size - need)
                return Span(off, need)
        return None

    def free(self, span: Span) -> None:
        i = bisect.bisect(self._holes, (span.offset, span.nbytes))
        self._holes.insert(i, (span.offset, span.nbytes))
        merged: t.List[t.Tuple[int, int]] = []
        for off, size in self._holes:
            if merged and merged[-1][0] + merged[-1][1] == off:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((off, size))
        self._holes = merged

    def view(self, span: Span, nbytes: int) -> torch.Tensor:
        return self.base[span.offset : span.offset + nbytes]


class StreamBank:
    def __init__(self, n: int):
        self._streams = deque(torch.cuda.Stream() for _ in range(n))

    def borrow(self) -> t.Optional[torch.cuda.Stream]:
        return self._streams.popleft() if self._streams else None

    def restore(self, stream: torch.cuda.Stream) -> None:
        self._streams.append(stream)


@dataclass
class Copy:
    span: Span
    stream: torch.cuda.Stream
    event: torch.cuda.Event
    dst: torch.Tensor


class CopyEngine:
    def __init__(self, arena: PinnedArena, bank: StreamBank):
        self.arena = arena
        self.bank = bank
        self.active: t.List[Copy] = []
        self.readback: t.Dict[str, Span] = {}

    def _stage(self, src: bytes) -> t.Optional[Span]:
        span = self.arena.alloc(len(src))  # clean: returned filled to the caller
        if span is not None:
            self.arena.view(span, len(src)).copy_(torch.frombuffer(bytearray(src), dtype=torch.uint8))
        return span

    def submit(self, src: bytes, dst: torch.Tensor) -> bool:
        span = self._stage(src)  # leak: cancel() restores the stream and forgets the span
        if span is None:
            return False
        stream = self.bank.borrow()  # clean: poll() and cancel() restore it
        if stream is None:
            self.arena.free(span)
            return False
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            dst.copy_(self.arena.view(span, dst.numel()), non_blocking=True)
            event.record(stream)
        self.active.append(Copy(span, stream, event, dst))
        return True

    def poll(self) -> int:
        still: t.List[Copy] = []
        done = 0
        for c in self.active:
            if not c.event.query():
                still.append(c)
                continue
            self.arena.free(c.span)
            self.bank.restore(c.stream)
            done += 1
        self.active = still
        return done

    def cancel(self) -> None:
        for c in self.active:
            c.stream.synchronize()
            self.bank.restore(c.stream)
        self.active.clear()

    def copy_sync(self, src: bytes, dst: torch.Tensor) -> bool:
        stream = self.bank.borrow()  # leak: not restored when the arena is full
        if stream is None:
            return False
        span = self._stage(src)  # clean: freed after the synchronize
        if span is None:
            return False
        with torch.cuda.stream(stream):
            dst.copy_(self.arena.view(span, dst.numel()), non_blocking=True)
        stream.synchronize()
        self.arena.free(span)
        self.bank.restore(stream)
        return True

    def read_back(self, name: str, src: torch.Tensor) -> bool:
        span = self.arena.alloc(src.numel())  # leak: a second read-back under the same name overwrites the table entry
        if span is None:
            return False
        self.arena.view(span, src.numel()).copy_(src.view(torch.uint8).flatten()[: src.numel()])
        self.readback[name] = span
        return True

    def collect(self, name: str, nbytes: int) -> t.Optional[bytes]:
        span = self.readback.pop(name, None)
        if span is None:
            return None
        data = self.arena.view(span, nbytes).numpy().tobytes()
        self.arena.free(span)
        return data

    def read_many(self, tensors: t.Sequence[torch.Tensor]) -> t.List[bytes]:
        out: t.List[bytes] = []
        spans: t.List[Span] = []
        stream = self.bank.borrow()  # clean: near miss, restored after the loop however the loop ends
        if stream is None:
            return out
        for src in tensors:
            span = self.arena.alloc(src.numel())  # clean: near miss, collected in spans and freed after the break too
            if span is None:
                break
            spans.append(span)
            with torch.cuda.stream(stream):
                self.arena.view(span, src.numel()).copy_(src, non_blocking=True)
        stream.synchronize()
        for src, span in zip(tensors, spans):
            out.append(self.arena.view(span, src.numel()).numpy().tobytes())
            self.arena.free(span)
        self.bank.restore(stream)
        return out

    def stream_chunks(self, src: torch.Tensor, chunk: int) -> t.Iterator[bytes]:
        span = self.arena.alloc(chunk)  # clean: near miss, the generator's finally frees it
        if span is None:
            return
        try:
            for lo in range(0, src.numel(), chunk):
                part = src[lo : lo + chunk]
                self.arena.view(span, part.numel()).copy_(part)
                yield self.arena.view(span, part.numel()).numpy().tobytes()
        finally:
            self.arena.free(span)

    def double_buffered(self, blobs: t.Iterable[bytes], dst: torch.Tensor) -> int:
        prev: t.Optional[Span] = None
        n = 0
        for blob in blobs:
            cur = self._stage(blob)  # leak: the span of the last blob is left in prev when the loop ends
            if cur is None:
                break
            dst.copy_(self.arena.view(cur, dst.numel()), non_blocking=True)
            torch.cuda.current_stream().synchronize()
            if prev is not None:
                self.arena.free(prev)
            prev = cur
            n += 1
        return n
