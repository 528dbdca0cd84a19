from __future__ import annotations

import queue
import threading
from typing import Iterable, Iterator, Sequence

import torch

from .collate import Batch, Collator


class PrefetchIterator:
    """Collates on a thread and hands out tensors; slots go back as soon as they are copied."""

    def __init__(self, source: Iterable[Sequence[tuple[bytes, int]]], collator: Collator, depth: int = 2) -> None:
        self.source = source
        self.collator = collator
        self.depth = depth
        self.stop = threading.Event()
        self._q: queue.Queue[Batch | None] = queue.Queue(depth)
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self.last: Batch | None = None

    def start(self) -> None:
        self._thread.start()

    def _offer(self, batch: Batch | None) -> bool:
        while not self.stop.is_set():
            try:
                self._q.put(batch, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _fill(self) -> None:
        for samples in self.source:
            batch = self.collator.collate(samples)  # clean: near miss, given back when the offer fails at stop, else taken from the queue by a reader or close()
            if batch is None:
                continue
            if not self._offer(batch):
                self.collator.give_back(batch)
                return
        self._offer(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            batch = self._q.get()  # clean: near miss, given back in the finally before the tensor is yielded
            if batch is None:
                return
            try:
                out = batch.tensor()
            finally:
                self.collator.give_back(batch)
            yield out

    def views(self) -> Iterator[Batch]:
        """Zero-copy batches; each is valid until the next one."""
        while True:
            batch = self._q.get()  # clean: near miss, kept in last, which is given back before the next and by close()
            if self.last is not None:
                self.collator.give_back(self.last)
                self.last = None
            if batch is None:
                return
            self.last = batch
            yield batch

    def take(self, n: int) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        while len(out) < n:
            batch = self._q.get()  # leak: an unlabelled batch is skipped without being given back
            if batch is None:
                break
            if not any(batch.labels):
                continue
            out.append(batch.tensor())
            self.collator.give_back(batch)
        return out

    def peek_shape(self, samples: Sequence[tuple[bytes, int]]) -> torch.Size | None:
        batch = self.collator.collate(samples)  # leak: only the shape leaves the function, the batch keeps its slots
        if batch is None or not batch.parts:
            return None
        return batch.tensor().shape

    def close(self) -> None:
        self.stop.set()
        self._thread.join()
        while True:
            try:
                batch = self._q.get_nowait()  # clean: near miss, None marks the end, every other is given back
            except queue.Empty:
                break
            if batch is not None:
                self.collator.give_back(batch)
        if self.last is not None:
            self.collator.give_back(self.last)
            self.last = None
