"""Staging of host tensors through page-locked buffers for asynchronous H2D copies."""
from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Callable, Generator, Iterable, Iterator

import torch


class PinnedBuf:
    __slots__ = ("mem", "size_class", "tag")

    def __init__(self, size_class: int) -> None:
        self.mem = torch.empty(size_class, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.size_class = size_class
        self.tag: Any = None

    def view(self, n: int) -> torch.Tensor:
        return self.mem[:n]


class PinnedArena:
    def __init__(self, classes: dict[int, int]) -> None:
        self._bins = {size: deque(PinnedBuf(size) for _ in range(n)) for size, n in sorted(classes.items())}
        self._lock = threading.Lock()

    def obtain(self, nbytes: int) -> PinnedBuf | None:
        with self._lock:
            for size, bin_ in self._bins.items():
                if size >= nbytes and bin_:
                    return bin_.popleft()
        return None

    def obtain_matching(self, nbytes: int, tag: Any) -> PinnedBuf | None:
        with self._lock:
            for size, bin_ in self._bins.items():
                if size < nbytes:
                    continue
                for _ in range(len(bin_)):
                    buf = bin_.popleft()  # leak: a buffer with another tag is popped and never appended again
                    if buf.tag is None or buf.tag == tag:
                        return buf
        return None

    def rotate(self) -> None:
        with self._lock:
            for bin_ in self._bins.values():
                for _ in range(len(bin_)):
                    buf = bin_.popleft()  # clean: near miss, every popped buffer is appended again
                    buf.tag = None
                    bin_.append(buf)

    def recycle(self, buf: PinnedBuf) -> None:
        with self._lock:
            self._bins[buf.size_class].append(buf)


class EventPool:
    def __init__(self, n: int) -> None:
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(n):
            self._events.put(torch.cuda.Event())

    def get_event(self) -> torch.cuda.Event:
        return self._events.get()

    def put_event(self, ev: torch.cuda.Event) -> None:
        self._events.put(ev)


class Stager:
    def __init__(self, arena: PinnedArena, events: EventPool, stream: torch.cuda.Stream) -> None:
        self.arena = arena
        self.events = events
        self.stream = stream
        self._inflight: deque[tuple[torch.cuda.Event, PinnedBuf]] = deque()

    def copy_async(self, src: bytes, dst: torch.Tensor) -> bool:
        self.reap()
        buf = self.arena.obtain(len(src))  # clean: near miss, moves into _inflight, where reap recycles it
        if buf is None:
            return False
        buf.view(len(src)).copy_(torch.frombuffer(bytearray(src), dtype=torch.uint8))
        with torch.cuda.stream(self.stream):
            dst.copy_(buf.view(len(src)), non_blocking=True)
            ev = self.events.get_event()  # clean: moves into _inflight, reap puts it back
            ev.record(self.stream)
        self._inflight.append((ev, buf))
        return True

    def reap(self) -> int:
        n = 0
        while self._inflight and self._inflight[0][0].query():
            ev, buf = self._inflight.popleft()
            self.arena.recycle(buf)
            self.events.put_event(ev)
            n += 1
        return n

    def copy_sync(self, src: bytes, dst: torch.Tensor) -> bool:
        buf = self.arena.obtain(len(src))  # clean: recycled after the synchronise
        if buf is None:
            return False
        buf.view(len(src)).copy_(torch.frombuffer(bytearray(src), dtype=torch.uint8))
        dst.copy_(buf.view(len(src)))
        ev = self.events.get_event()  # leak: synchronised upon and then dropped
        ev.record(self.stream)
        ev.synchronize()
        self.arena.recycle(buf)
        return True

    def timed(self, fn: Callable[[], None]) -> float:
        begin = self.events.get_event()  # clean: put back below
        end = self.events.get_event()  # clean: put back below
        begin.record(self.stream)
        fn()
        end.record(self.stream)
        end.synchronize()
        elapsed = begin.elapsed_time(end)
        for ev in (begin, end):
            self.events.put_event(ev)
        return elapsed

    def pack(self, blobs: Iterable[bytes], limit: int) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for blob in blobs:
            buf = self.arena.obtain(len(blob))  # leak: oversized blobs continue after the buffer was obtained
            if buf is None:
                break
            if len(blob) > limit:
                continue
            staged = buf.view(len(blob))
            staged.copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8))
            out.append(staged.to("cuda"))
            self.arena.recycle(buf)
        return out

    def chunks(self, source: Iterator[bytes], size: int) -> Generator[torch.Tensor, None, None]:
        buf = self.arena.obtain(size)  # clean: near miss, finally recycles even if the consumer closes the generator
        if buf is None:
            return
        try:
            for piece in source:
                if len(piece) > size:
                    return
                buf.view(len(piece)).copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
                yield buf.view(len(piece))
        finally:
            self.arena.recycle(buf)

    def tagged(self, tag: str, nbytes: int) -> PinnedBuf | None:
        buf = self.arena.obtain_matching(nbytes, tag)  # clean: near miss, falls back to any buffer only when None, and hands it on
        if buf is None:
            buf = self.arena.obtain(nbytes)  # clean: handed to the caller
        if buf is not None:
            buf.tag = tag
        return buf

    def checksum(self, tag: str, blob: bytes) -> int:
        buf = self.tagged(tag, len(blob))  # leak: an empty blob answers 0 before the recycle
        if buf is None:
            return -1
        if not blob:
            return 0
        total = int(buf.view(len(blob)).copy_(torch.frombuffer(bytearray(blob), dtype=torch.uint8)).sum())
        self.arena.recycle(buf)
        return total

    def largest(self, sizes: list[int]) -> PinnedBuf | None:
        best: PinnedBuf | None = None
        for n in sizes:
            cand = self.arena.obtain(n)  # leak: the smaller candidate held so far is replaced without recycle
            if cand is None:
                continue
            if best is None or cand.size_class > best.size_class:
                best = cand
            else:
                self.arena.recycle(cand)
        return best
