"""Host-to-device staging for the training data loader (pinned buffers in a queue)."""
from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Iterator, Optional

import torch


@dataclass
class PinnedSlab:
    data: torch.Tensor
    event: Optional[torch.cuda.Event] = None
    filled: int = 0

    def done(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class StagedBatch:
    slab: PinnedSlab
    rows: int


class SlabDepot:
    def __init__(self, count: int, shape: tuple[int, ...]) -> None:
        self._shelf: "queue.Queue[PinnedSlab]" = queue.Queue()
        self._cooling: list[PinnedSlab] = []
        for _ in range(count):
            self._shelf.put(PinnedSlab(torch.empty(shape).pin_memory()))

    def fetch(self, timeout: float = 10.0) -> PinnedSlab:
        self._reap()
        slab = self._shelf.get(timeout=timeout)  # clean: returned to the caller
        slab.filled = 0
        return slab

    def fetch_nowait(self) -> Optional[PinnedSlab]:
        self._reap()
        try:
            return self._shelf.get_nowait()  # clean: returned to the caller
        except queue.Empty:
            return None

    def restore(self, slab: PinnedSlab) -> None:
        """Back on the shelf once its copy has finished."""
        if slab.done():
            self._shelf.put(slab)
        else:
            self._cooling.append(slab)

    def _reap(self) -> None:
        hot: list[PinnedSlab] = []
        while self._cooling:
            slab = self._cooling.pop()  # clean: near miss, goes to the shelf or to the list that becomes _cooling
            if slab.done():
                self._shelf.put(slab)
            else:
                hot.append(slab)
        self._cooling = hot


class StagingLoader:
    def __init__(self, source: Iterator[torch.Tensor], depot: SlabDepot, device: torch.device) -> None:
        self.source = source
        self.depot = depot
        self.device = device
        self.staged: "queue.Queue[Optional[StagedBatch]]" = queue.Queue(4)
        self.stopped = threading.Event()

    def producer(self) -> None:
        for sample in self.source:
            slab = self.depot.fetch()  # leak: leaving on the stop flag keeps the slab just fetched
            if self.stopped.is_set():
                break
            rows = sample.shape[0]
            slab.data[:rows].copy_(sample)
            slab.filled = rows
            self.staged.put(StagedBatch(slab, rows))
        self.staged.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self.staged.get()  # clean: restored before the tensor is yielded
            if batch is None:
                return
            out = batch.slab.data[: batch.rows].to(self.device, non_blocking=True)
            batch.slab.event = torch.cuda.Event()
            batch.slab.event.record()
            self.depot.restore(batch.slab)
            yield out

    def iter_min_rows(self, least: int) -> Iterator[torch.Tensor]:
        while True:
            batch = self.staged.get()  # leak: short batches are skipped with their slab
            if batch is None:
                return
            if batch.rows < least:
                continue
            out = batch.slab.data[: batch.rows].to(self.device)
            self.depot.restore(batch.slab)
            yield out

    def stop(self) -> None:
        self.stopped.set()
        while True:
            batch = self.staged.get()  # clean: near miss, the sentinel is the only thing not restored
            if batch is None:
                break
            self.depot.restore(batch.slab)


class BatchPacker:
    """Packs variable-length documents into one slab."""

    def __init__(self, depot: SlabDepot, capacity: int) -> None:
        self.depot = depot
        self.capacity = capacity
        self.current: Optional[PinnedSlab] = None

    def push(self, doc: torch.Tensor) -> Optional[PinnedSlab]:
        full = None
        if self.current is not None and self.current.filled + len(doc) > self.capacity:
            full, self.current = self.current, None
        if self.current is None:
            self.current = self.depot.fetch()  # clean: near miss, the full one was moved out to be returned first
        end = self.current.filled + len(doc)
        self.current.data[self.current.filled:end] = doc
        self.current.filled = end
        return full

    def finish(self) -> None:
        if self.current is not None:
            self.depot.restore(self.current)
            self.current = None


def pack_all(packer: BatchPacker, docs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    out = []
    for doc in docs:
        slab = packer.push(doc)  # clean: a full slab is uploaded and restored
        if slab is not None:
            out.append(slab.data[: slab.filled].to(device))
            packer.depot.restore(slab)
    packer.finish()
    return out


def upload(depot: SlabDepot, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    slab = depot.fetch_nowait()  # leak: another dtype takes the direct copy although a slab was fetched
    if slab is None:
        return tensor.to(device)
    if slab.data.dtype != tensor.dtype:
        return tensor.to(device)
    slab.data[: len(tensor)].copy_(tensor)
    out = slab.data[: len(tensor)].to(device)
    depot.restore(slab)
    return out


def upload_pair(depot: SlabDepot, x: torch.Tensor, y: torch.Tensor, device: torch.device):
    sx = depot.fetch_nowait()  # leak: falls to the plain copy with sx still held when sy is missing
    sy = depot.fetch_nowait() if sx is not None else None  # clean: restored whenever there are two
    if sx is None or sy is None:
        return x.to(device), y.to(device)
    sx.data[: len(x)].copy_(x)
    sy.data[: len(y)].copy_(y)
    pair = sx.data[: len(x)].to(device), sy.data[: len(y)].to(device)
    depot.restore(sx)
    depot.restore(sy)
    return pair
