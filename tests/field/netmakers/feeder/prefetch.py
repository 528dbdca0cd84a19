"""Host-to-device prefetch on a thread."""
from __future__ import annotations

import queue
import threading
from typing import Iterable, Iterator

import torch

from .arena import RowLease
from .batcher import PackedBatch, Packer


class Prefetcher:
    def __init__(self, packer: Packer, device: torch.device, depth: int = 2) -> None:
        self.packer = packer
        self.device = device
        self.ready: queue.Queue[PackedBatch | None] = queue.Queue(maxsize=depth)
        self.stopping = threading.Event()

    def run(self, docs: Iterable[list[int]]) -> None:
        for batch in self.packer.pack(docs):  # leak: the batch at hand is lost when stopping is set
            if self.stopping.is_set():
                break
            self.ready.put(batch)
        self.ready.put(None)

    def _upload(self, batch: PackedBatch) -> torch.Tensor:
        return self.packer.arena.tokens[batch.rows].to(self.device)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (batch := self.ready.get()) is not None:
            out = self._upload(batch)
            self.packer.release(batch)
            yield out

    def stop(self) -> None:
        self.stopping.set()
        while (batch := self.ready.get()) is not None:
            self.packer.release(batch)

    def evaluate(self, docs: Iterable[list[int]]) -> Iterator[torch.Tensor]:
        for batch in self.packer.pack(docs):  # clean: released before the rows on the device are passed on
            out = self._upload(batch)
            self.packer.release(batch)
            yield out

    def first(self, docs: Iterable[list[int]]) -> torch.Tensor | None:
        batch = self.packer.pack_greedy(docs)  # leak: uploaded and dropped, the rows stay allotted
        return None if batch is None else self._upload(batch)

    def padding_row(self, fill: int) -> torch.Tensor:
        lease = RowLease(self.packer.arena)  # clean: closed in finally
        try:
            self.packer.arena.tokens[lease.row].fill_(fill)
            return self.packer.arena.tokens[lease.row].to(self.device)
        finally:
            lease.close()

    def sample_row(self, doc: list[int]) -> torch.Tensor:
        lease = RowLease(self.packer.arena)  # leak: detached as an argument, then close() has nothing to give back
        try:
            return self.packer.arena.tokens[lease.detach(), : len(doc)].clone()
        finally:
            lease.close()
