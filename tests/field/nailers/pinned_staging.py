"""Pinned host buffers for device-to-host copies, completed by stream callbacks."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Callable, Optional

import torch


class PinnedRing:
    """Page-locked buffers of equal size. `get` blocks, `try_get` does not."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._q: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.nbytes = nbytes
        self.count = count
        for _ in range(count):
            self._q.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def get(self) -> torch.Tensor:
        return self._q.get()

    def try_get(self) -> Optional[torch.Tensor]:
        try:
            return self._q.get_nowait()
        except queue.Empty:
            return None

    def put(self, buf: torch.Tensor) -> None:
        self._q.put(buf)

    def resize(self, nbytes: int) -> None:
        """Replace every buffer by one of the new size."""
        old = [self.get() for _ in range(self.count)]  # clean: near miss, new buffers take their places
        self.nbytes = nbytes
        for _ in old:
            self.put(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def scrub(self) -> int:
        """Zero the idle buffers; those in use are left alone."""
        done = 0
        while done < self.count:
            buf = self.try_get()  # leak: zeroed but not put back
            if buf is None:
                break
            buf.zero_()
            done += 1
        return done


class StreamCallbacks:
    def __init__(self) -> None:
        self._pending: list[tuple[torch.cuda.Event, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def after(self, event: torch.cuda.Event, fn: Callable[[], None]) -> None:
        with self._lock:
            self._pending.append((event, fn))

    def poll(self) -> int:
        with self._lock:
            ready: list[Callable[[], None]] = []
            waiting: list[tuple[torch.cuda.Event, Callable[[], None]]] = []
            for event, fn in self._pending:
                if event.query():
                    ready.append(fn)
                else:
                    waiting.append((event, fn))
            self._pending = waiting
        for fn in ready:
            fn()
        return len(ready)


@dataclass
class CopyJob:
    src: torch.Tensor
    buf: torch.Tensor
    event: torch.cuda.Event
    sink: Callable[[bytes], None]


class StagingBuffer:
    """One buffer for the length of a `with` block."""

    def __init__(self, ring: PinnedRing) -> None:
        self.ring = ring
        self.buf: Optional[torch.Tensor] = None

    def __enter__(self) -> torch.Tensor:
        self.buf = self.ring.get()  # clean: put by __exit__
        return self.buf

    def __exit__(self, *exc: object) -> None:
        if self.buf is not None:
            self.ring.put(self.buf)
            self.buf = None


class FlushingBuffer(StagingBuffer):
    """Also flushes what was written; an empty buffer has nothing to flush."""

    def __init__(self, ring: PinnedRing, sink: Callable[[bytes], None]) -> None:
        super().__init__(ring)
        self.sink = sink
        self.length = 0

    def __enter__(self) -> "FlushingBuffer":
        self.buf = self.ring.get()  # leak: __exit__ returns early when nothing was written
        return self

    def append(self, data: bytes) -> None:
        end = self.length + len(data)
        self.buf[self.length:end] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.length = end

    def __exit__(self, *exc: object) -> None:
        if self.length == 0:
            return
        self.sink(self.buf[:self.length].numpy().tobytes())
        self.length = 0
        super().__exit__(*exc)


class OffloadEngine:
    def __init__(self, ring: PinnedRing, callbacks: StreamCallbacks) -> None:
        self.ring = ring
        self.callbacks = callbacks
        self.jobs: list[CopyJob] = []
        self.skipped = 0

    def copy_async(self, src: torch.Tensor, sink: Callable[[bytes], None]) -> None:
        buf = self.ring.get()  # clean: near miss, the stream callback puts it back
        view = buf[:src.numel()]
        view.copy_(src.flatten().view(torch.uint8)[:src.numel()], non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def done() -> None:
            sink(view.numpy().tobytes())
            self.ring.put(buf)

        self.callbacks.after(event, done)

    def copy_if_small(self, src: torch.Tensor, sink: Callable[[bytes], None]) -> bool:
        buf = self.ring.try_get()  # leak: tensors that are too large return False without a put
        if buf is None:
            return False
        size = src.numel() * src.element_size()
        if size > self.ring.nbytes:
            self.skipped += 1
            return False
        buf[:size].copy_(src.flatten().view(torch.uint8))
        sink(buf[:size].numpy().tobytes())
        self.ring.put(buf)
        return True

    def submit(self, src: torch.Tensor, sink: Callable[[bytes], None]) -> bool:
        buf = self.ring.try_get()  # clean: moved into a CopyJob, reap() puts it back
        if buf is None:
            return False
        event = torch.cuda.Event()
        buf[:src.numel()].copy_(src.flatten(), non_blocking=True)
        event.record()
        self.jobs.append(CopyJob(src, buf, event, sink))
        return True

    def reap(self) -> int:
        left: list[CopyJob] = []
        for job in self.jobs:
            if not job.event.query():
                left.append(job)
                continue
            job.sink(job.buf.numpy().tobytes())
            self.ring.put(job.buf)
        done = len(self.jobs) - len(left)
        self.jobs = left
        return done

    def checksum(self, src: torch.Tensor) -> int:
        with StagingBuffer(self.ring) as buf:  # clean: __exit__ puts it back
            buf[:src.numel()].copy_(src.flatten())
            return int(buf[:src.numel()].sum())

    def spill(self, chunks: list[bytes], sink: Callable[[bytes], None]) -> int:
        total = 0
        with FlushingBuffer(self.ring, sink) as out:  # clean: the with ends it; what __exit__ does is its own
            for chunk in chunks:
                if total + len(chunk) > self.ring.nbytes:
                    break
                out.append(chunk)
                total += len(chunk)
        return total

    def double_buffered(self, parts: list[torch.Tensor], sink: Callable[[bytes], None]) -> None:
        """Fill one buffer while the other is written out."""
        front = self.ring.get()  # clean: near miss, swapped with back, both put at the end
        back = self.ring.get()  # clean: near miss, swapped with front, both put at the end
        for part in parts:
            front[:part.numel()].copy_(part.flatten(), non_blocking=True)
            front, back = back, front
            sink(back[:part.numel()].numpy().tobytes())
        self.ring.put(front)
        self.ring.put(back)

    def grow_to_fit(self, sizes: list[int]) -> int:
        buf = self.ring.get()  # leak: a larger size rebinds buf and the ring's own is lost
        for size in sizes:
            if size > buf.numel():
                buf = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        length = buf.numel()
        if length == self.ring.nbytes:
            self.ring.put(buf)
        return length
