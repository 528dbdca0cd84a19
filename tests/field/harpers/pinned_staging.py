"""Pinned host staging for asynchronous uploads and downloads."""
from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch


class PinnedBuffer:
    __slots__ = ("index", "data", "used")

    def __init__(self, index: int, nbytes: int):
        self.index = index
        self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.used = 0

    def fill(self, payload: torch.Tensor) -> None:
        flat = payload.contiguous().view(torch.uint8).flatten()
        self.data[: flat.numel()].copy_(flat)
        self.used = flat.numel()


class PinnedRing:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._ready: queue.Queue[PinnedBuffer] = queue.Queue()
        for i in range(count):
            self._ready.put(PinnedBuffer(i, nbytes))

    def borrow(self, timeout: float = 5.0) -> PinnedBuffer:
        return self._ready.get(timeout=timeout)

    def try_borrow(self) -> PinnedBuffer | None:
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def give(self, buf: PinnedBuffer) -> None:
        buf.used = 0
        self._ready.put(buf)


@dataclass
class Flight:
    buf: PinnedBuffer
    event: torch.cuda.Event
    dst: torch.Tensor


class Uploader:
    """Uploads run on a side stream; reap() gives back the buffers whose copy is done."""

    def __init__(self, ring: PinnedRing, stream: torch.cuda.Stream):
        self.ring = ring
        self.stream = stream
        self.flights: deque[Flight] = deque()

    def submit(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        buf = self.ring.borrow()  # clean: near miss, travels in the flight and is given back by reap
        buf.fill(src)
        event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            dst.view(torch.uint8).flatten().copy_(buf.data[: buf.used], non_blocking=True)
            event.record(self.stream)
        self.flights.append(Flight(buf, event, dst))

    def reap(self, block: bool = False) -> int:
        done = 0
        while self.flights:
            head = self.flights[0]
            if not head.event.query():
                if not block:
                    break
                head.event.synchronize()
            self.flights.popleft()
            self.ring.give(head.buf)
            done += 1
        return done

    def close(self) -> None:
        self.reap(block=True)


class Downloader:
    """Downloads to host; poll() hands finished tensors to the consumer."""

    def __init__(self, ring: PinnedRing):
        self.ring = ring
        self.pending: dict[str, Flight] = {}

    def request(self, name: str, src: torch.Tensor) -> None:
        buf = self.ring.borrow()  # leak: cancel throws the flight away and keeps the buffer
        buf.data[: src.nbytes].copy_(src.view(torch.uint8).flatten(), non_blocking=True)
        buf.used = src.nbytes
        event = torch.cuda.Event()
        event.record()
        self.pending[name] = Flight(buf, event, src)

    def poll(self) -> dict[str, torch.Tensor]:
        finished = {}
        for name in [n for n, f in self.pending.items() if f.event.query()]:
            flight = self.pending.pop(name)
            finished[name] = flight.buf.data[: flight.buf.used].clone()
            self.ring.give(flight.buf)
        return finished

    def cancel(self, name: str) -> bool:
        flight = self.pending.pop(name, None)
        if flight is None:
            return False
        flight.event.synchronize()
        return True


def upload_chunks(ring: PinnedRing, src: torch.Tensor, dst: torch.Tensor) -> int:
    """Double buffered copy of one large tensor, synchronous at the end."""
    flat_src = src.view(torch.uint8).flatten()
    flat_dst = dst.view(torch.uint8).flatten()
    prev: PinnedBuffer | None = None
    sent = 0
    while sent < flat_src.numel():
        cur = ring.borrow()  # clean: near miss, it becomes prev and prev is given back a turn later or after the loop
        chunk = flat_src[sent:sent + ring.nbytes]
        cur.fill(chunk)
        flat_dst[sent:sent + chunk.numel()].copy_(cur.data[: cur.used], non_blocking=True)
        if prev is not None:
            torch.cuda.current_stream().synchronize()
            ring.give(prev)
        prev = cur
        sent += chunk.numel()
    if prev is not None:
        torch.cuda.current_stream().synchronize()
        ring.give(prev)
    return sent


def upload_rows(ring: PinnedRing, rows: list[torch.Tensor], dst: torch.Tensor) -> int:
    prev: PinnedBuffer | None = None
    for i, row in enumerate(rows):
        cur = ring.borrow()  # leak: the last buffer stays in prev after the loop
        cur.fill(row)
        dst[i].view(torch.uint8).copy_(cur.data[: cur.used], non_blocking=True)
        if prev is not None:
            ring.give(prev)
        prev = cur
    torch.cuda.current_stream().synchronize()
    return len(rows)


def upload_with_retry(ring: PinnedRing, src: torch.Tensor, dst: torch.Tensor, attempts: int = 3) -> bool:
    for attempt in range(attempts):
        buf = ring.borrow()  # leak: a failed verification goes to the next attempt with another buffer
        buf.fill(src)
        dst.view(torch.uint8).flatten().copy_(buf.data[: buf.used])
        if torch.equal(dst.cpu(), src):
            ring.give(buf)
            return True
        time.sleep(0.01 * (attempt + 1))
    return False


def upload_reusing(ring: PinnedRing, src: torch.Tensor, dst: torch.Tensor, attempts: int = 3) -> bool:
    buf: PinnedBuffer | None = None
    for _ in range(attempts):
        if buf is None:
            buf = ring.borrow()  # clean: near miss, borrowed once for all the attempts and given back after them
        buf.fill(src)
        dst.view(torch.uint8).flatten().copy_(buf.data[: buf.used])
        if torch.equal(dst.cpu(), src):
            break
    if buf is None:
        return False
    ring.give(buf)
    return torch.equal(dst.cpu(), src)


class LogitsDump:
    """Writes logits to disk from a worker thread; the worker's callback gives the buffer back."""

    def __init__(self, ring: PinnedRing, directory: str):
        self.ring = ring
        self.directory = directory
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.errors = 0

    def _write(self, buf: PinnedBuffer, step: int) -> int:
        with open(f"{self.directory}/{step}.bin", "wb") as out:  # clean: closed by with
            return out.write(bytes(buf.data[: buf.used].numpy()))

    def dump(self, step: int, logits: torch.Tensor) -> Future:
        buf = self.ring.borrow()  # clean: near miss, given back by the done callback
        buf.fill(logits.cpu())
        task = self.pool.submit(self._write, buf, step)
        task.add_done_callback(lambda _: self.ring.give(buf))
        return task

    def dump_sampled(self, step: int, logits: torch.Tensor, every: int) -> Future | None:
        buf = self.ring.borrow()  # leak: steps that are not sampled return without giving it back
        buf.fill(logits.cpu())
        if step % every:
            return None
        task = self.pool.submit(self._write, buf, step)
        task.add_done_callback(lambda _: self.ring.give(buf))
        return task

    def index(self, steps: list[int]) -> None:
        out = open(f"{self.directory}/index.txt", "a")  # leak: never closed
        for step in steps:
            out.write(f"{step}\n")
        out.flush()


class Prefetcher(threading.Thread):
    """Fills buffers ahead of the consumer."""

    def __init__(self, ring: PinnedRing, source: "queue.Queue[torch.Tensor | None]", depth: int):
        super().__init__(daemon=True)
        self.ring, self.source = ring, source
        self.filled: queue.Queue[PinnedBuffer | None] = queue.Queue(maxsize=depth)

    def run(self) -> None:
        while True:
            item = self.source.get()
            if item is None:
                break
            buf = self.ring.borrow()  # clean: near miss, put on the queue which consume drains up to the sentinel
            buf.fill(item)
            self.filled.put(buf)
        self.filled.put(None)

    def consume(self, dst: torch.Tensor) -> int:
        total = 0
        while (buf := self.filled.get()) is not None:
            dst[total:total + buf.used].copy_(buf.data[: buf.used])
            total += buf.used
            self.ring.give(buf)
        return total
