"""Pinned host staging for the training input pipeline."""
from __future__ import annotations

import logging
import queue
import threading
from typing import Callable, Iterable, Iterator, Optional

import torch

_log = logging.getLogger(__name__)


class HostBuffer:
    def __init__(self, nbytes: int):
        self.raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.used = 0
        self.event: Optional[torch.cuda.Event] = None

    def fill(self, payload: bytes) -> bool:
        if len(payload) > self.raw.numel():
            return False
        self.raw[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.used = len(payload)
        return True


class StagingRing:
    def __init__(self, depth: int, nbytes: int):
        self._q: "queue.Queue[HostBuffer]" = queue.Queue()
        for _ in range(depth):
            self._q.put(HostBuffer(nbytes))

    def obtain(self) -> HostBuffer:
        buf = self._q.get()  # clean: returned to the caller
        if buf.event is not None:
            buf.event.synchronize()
            buf.event = None
        return buf

    def obtain_soon(self, timeout: float) -> Optional[HostBuffer]:
        try:
            buf = self._q.get(timeout=timeout)  # leak: a buffer whose copy is still in flight is dropped with None returned
        except queue.Empty:
            return None
        if buf.event is not None and not buf.event.query():
            return None
        buf.event = None
        return buf

    def obtain_ready(self) -> Optional[HostBuffer]:
        for _ in range(self._q.qsize()):
            try:
                buf = self._q.get_nowait()  # clean: near miss, a buffer in flight is put back, the ready one returned
            except queue.Empty:
                return None
            if buf.event is None or buf.event.query():
                buf.event = None
                return buf
            self._q.put(buf)
        return None

    def recycle(self, buf: HostBuffer, event: Optional[torch.cuda.Event] = None) -> None:
        buf.event = event
        buf.used = 0
        self._q.put(buf)


class Batch:
    """Host buffer and where its samples start. `finish` recycles the buffer."""

    def __init__(self, ring: StagingRing, buf: HostBuffer):
        self.ring = ring
        self.buf: Optional[HostBuffer] = buf
        self.offsets: list[int] = [0]

    def finish(self, event=None) -> None:
        if self.buf is not None:
            self.ring.recycle(self.buf, event)
            self.buf = None

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *exc) -> None:
        self.finish()


def load_one(ring: StagingRing, payload: bytes, stream: torch.cuda.Stream) -> Optional[torch.Tensor]:
    buf = ring.obtain()  # leak: oversized payload returns None without recycle
    if not buf.fill(payload):
        _log.warning("payload of %d bytes does not fit", len(payload))
        return None
    with torch.cuda.stream(stream):
        dev = buf.raw[: buf.used].to("cuda", non_blocking=True)
        ev = torch.cuda.Event()
        ev.record(stream)
    ring.recycle(buf, ev)
    return dev


def load_sync(ring: StagingRing, payload: bytes) -> torch.Tensor:
    buf = ring.obtain()  # clean: recycled by the finally
    try:
        if not buf.fill(payload):
            raise ValueError("too large")
        return buf.raw[: buf.used].to("cuda")
    finally:
        ring.recycle(buf)


def open_batch(ring: StagingRing, payload: bytes) -> Optional[Batch]:
    buf = ring.obtain()  # clean: near miss, recycled when it does not fit, else owned by the returned batch
    if buf.fill(payload):
        return Batch(ring, buf)
    ring.recycle(buf)
    return None


def stream_batches(ring: StagingRing, payloads: Iterable[bytes]) -> Iterator[HostBuffer]:
    """The consumer sees each buffer only until it asks for the next one."""
    for p in payloads:
        buf = ring.obtain()  # clean: recycled by the finally after the consumer's turn
        try:
            if buf.fill(p):
                yield buf
        finally:
            ring.recycle(buf)


def stream_filtered(ring: StagingRing, payloads: Iterable[bytes], keep: Callable) -> Iterator[torch.Tensor]:
    for p in payloads:
        buf = ring.obtain()  # leak: filtered samples continue without recycle
        buf.fill(p)
        if not keep(buf.raw[: buf.used]):
            continue
        out = buf.raw[: buf.used].cuda()
        ring.recycle(buf)
        yield out


class Prefetcher:
    """One thread fills batches ahead of the training loop."""

    def __init__(self, ring: StagingRing, source: Callable[[], Optional[bytes]], depth: int = 4):
        self.ring = ring
        self.source = source
        self.out: "queue.Queue[Optional[Batch]]" = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _pump(self) -> None:
        while not self._stop.is_set():
            payload = self.source()
            if payload is None:
                break
            batch = open_batch(self.ring, payload)  # clean: near miss, put on self.out, which next and close empty
            if batch is None:
                continue
            self.out.put(batch)
        self.out.put(None)

    def next(self) -> Optional[torch.Tensor]:
        batch = self.out.get()  # clean: finished by the with block
        if batch is None:
            return None
        with batch:
            return batch.buf.raw[: batch.buf.used].cuda()

    def next_raw(self) -> Optional[Batch]:
        return self.out.get()  # clean: handed to the caller

    def skip(self, n: int) -> int:
        skipped = 0
        while skipped < n:
            batch = self.out.get()  # leak: skipped batches are never finished
            if batch is None:
                break
            skipped += 1
        return skipped

    def peek_size(self) -> int:
        batch = self.next_raw()  # leak: the size is read and the batch dropped
        return 0 if batch is None else batch.buf.used

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive() or not self.out.empty():
            try:
                batch = self.out.get(timeout=0.1)  # clean: finished unless it is the sentinel
            except queue.Empty:
                continue
            if batch is not None:
                batch.finish()
        self._thread.join()
