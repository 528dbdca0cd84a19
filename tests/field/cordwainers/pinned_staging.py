"""Pinned host buffers for embedding lookups: a ring feeds the copy stream, a thread fills it."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Iterable, Iterator

import torch


@dataclass
class Lease:
    index: int
    buf: torch.Tensor
    length: int = 0


class StagingRing:
    def __init__(self, n: int, rows: int, dim: int) -> None:
        self._bufs = [torch.empty(rows, dim).pin_memory() for _ in range(n)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(n):
            self._free.put(i)
        self.rows = rows

    def next_buffer(self, timeout: float | None = None) -> Lease | None:
        try:
            i = self._free.get(timeout=timeout)
        except queue.Empty:
            return None
        return Lease(i, self._bufs[i])

    def recycle(self, lease: Lease) -> None:
        self._free.put(lease.index)


def fill(lease: Lease, table: torch.Tensor, ids: list[int]) -> Lease:
    n = min(len(ids), lease.buf.shape[0])
    torch.index_select(table, 0, torch.tensor(ids[:n], dtype=torch.long), out=lease.buf[:n])
    lease.length = n
    return lease


def stage(ring: StagingRing, table: torch.Tensor, ids: list[int]) -> Lease:
    lease = ring.next_buffer()  # clean: filled and handed to the caller
    return fill(lease, table, ids)


def gather_many(ring: StagingRing, table: torch.Tensor, bags: list[list[int]]) -> list[torch.Tensor]:
    outs = []
    for ids in bags:
        lease = stage(ring, table, ids)  # leak: empty bags take the continue with a buffer in hand
        if lease.length == 0:
            outs.append(table.new_zeros(table.shape[1]))
            continue
        outs.append(lease.buf[: lease.length].sum(0))
        ring.recycle(lease)
    return outs


def gather_mean(ring: StagingRing, table: torch.Tensor, bags: list[list[int]]) -> list[torch.Tensor]:
    outs = []
    for ids in bags:
        lease = stage(ring, table, ids)  # clean: near miss, both branches meet at recycle
        if lease.length == 0:
            outs.append(table.new_zeros(table.shape[1]))
        else:
            outs.append(lease.buf[: lease.length].mean(0))
        ring.recycle(lease)
    return outs


def chunks(ring: StagingRing, table: torch.Tensor, ids: list[int]) -> Iterator[Lease]:
    """Yields filled buffers; whoever iterates recycles them."""
    for lo in range(0, len(ids), ring.rows):
        yield stage(ring, table, ids[lo : lo + ring.rows])  # clean: handed to the consumer of the generator


def copy_chunks(ring: StagingRing, table: torch.Tensor, ids: list[int], out: torch.Tensor) -> int:
    at = 0
    for lease in chunks(ring, table, ids):  # clean: each buffer is recycled in its round
        out[at : at + lease.length].copy_(lease.buf[: lease.length])
        at += lease.length
        ring.recycle(lease)
    return at


def norm_chunks(ring: StagingRing, table: torch.Tensor, ids: list[int]) -> float:
    total = 0.0
    for lease in chunks(ring, table, ids):  # leak: the loop reads the buffers and recycles none
        total += float(lease.buf[: lease.length].square().sum())
    return total**0.5


def first_nan(ring: StagingRing, table: torch.Tensor, ids: list[int]) -> int:
    base = 0
    for lease in chunks(ring, table, ids):  # leak: the buffer with the NaN is in hand at the return
        bad = torch.isnan(lease.buf[: lease.length]).any(dim=1).nonzero()
        if len(bad):
            return base + int(bad[0])
        base += lease.length
        ring.recycle(lease)
    return -1


class Prefetcher:
    """A thread fills buffers ahead; `next_batch` gives them to the trainer, who recycles."""

    def __init__(self, ring: StagingRing, table: torch.Tensor, bags: Iterable[list[int]], depth: int) -> None:
        self.ring = ring
        self.table = table
        self._bags = iter(bags)
        self._ready: queue.Queue[Lease | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for ids in self._bags:
            if self._stop.is_set():
                break
            lease = self.ring.next_buffer(timeout=5.0)  # clean: near miss, queued; stop drains the queue
            if lease is None:
                break
            self._ready.put(fill(lease, self.table, ids))
        self._ready.put(None)

    def next_batch(self) -> Lease | None:
        return self._ready.get()

    def stop(self) -> None:
        self._stop.set()
        while self._thread.is_alive() or not self._ready.empty():
            try:
                lease = self._ready.get(timeout=0.1)
            except queue.Empty:
                continue
            if lease is not None:
                self.ring.recycle(lease)
        self._thread.join()


class SlowPrefetcher:
    """Like Prefetcher with a polling producer, for sources that block."""

    def __init__(self, ring: StagingRing, table: torch.Tensor, source: queue.Queue, depth: int) -> None:
        self.ring = ring
        self.table = table
        self.source = source
        self._ready: queue.Queue[Lease] = queue.Queue(depth)
        self._stop = threading.Event()

    def run(self) -> None:
        while not self._stop.is_set():
            lease = self.ring.next_buffer(timeout=1.0)  # leak: an idle source continues with the buffer
            if lease is None:
                continue
            try:
                ids = self.source.get(timeout=0.2)
            except queue.Empty:
                continue
            self._ready.put(fill(lease, self.table, ids))
        self._drain()

    def _drain(self) -> None:
        while not self._ready.empty():
            self.ring.recycle(self._ready.get())

    def stop(self) -> None:
        self._stop.set()


def train(pre: Prefetcher, model: torch.nn.Module, device: str, limit: int) -> float:
    loss_sum, step = 0.0, 0
    while step < limit:
        lease = pre.next_batch()  # leak: a short batch is skipped with its buffer
        if lease is None:
            break
        step += 1
        if lease.length < 2:
            continue
        x = lease.buf[: lease.length].to(device)
        pre.ring.recycle(lease)
        loss_sum += float(model(x).mean())
    pre.stop()
    return loss_sum / max(step, 1)


def upload_pair(ring: StagingRing, a: torch.Tensor, b: torch.Tensor, device: str) -> list[torch.Tensor]:
    leases = [
        ring.next_buffer(),  # clean: recycled at the end
        ring.next_buffer(),  # leak: only the first of the pair is recycled
    ]
    outs = []
    for lease, src in zip(leases, (a, b)):
        lease.buf[: len(src)].copy_(src)
        outs.append(lease.buf[: len(src)].to(device))
    ring.recycle(leases[0])
    return outs
