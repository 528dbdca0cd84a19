"""Columnar decode on the GPU: batches are staged in pooled pinned tensors, reduced on the device."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Deque, Dict, Iterator, List, Optional, Tuple

import torch


class TensorPool:
    """Tensors of one row length, kept by column count."""

    def __init__(self, rows: int, device: str, pinned: bool = False) -> None:
        self.rows = rows
        self.device = device
        self.pinned = pinned
        self._shelves: Dict[int, List[torch.Tensor]] = {}

    def rent(self, cols: int) -> torch.Tensor:
        shelf = self._shelves.setdefault(cols, [])
        if shelf:
            return shelf.pop()
        return torch.empty(self.rows, cols, device=self.device, pin_memory=self.pinned)

    def hand_back(self, t: torch.Tensor) -> None:
        self._shelves.setdefault(t.shape[1], []).append(t)


@dataclass
class Batch:
    topic: str
    cols: int
    rows: List[List[float]]


@dataclass
class InFlight:
    batch: Batch
    stage: torch.Tensor
    out: torch.Tensor
    event: torch.cuda.Event


class Decoder:
    def __init__(self, host: TensorPool, dev: TensorPool) -> None:
        self.host = host
        self.dev = dev
        self.flying: Deque[InFlight] = deque()
        self.rejected = 0

    def _staged(self, batch: Batch) -> torch.Tensor:
        """Rows of the batch in a host tensor of the pool; the caller hands it back."""
        t = self.host.rent(batch.cols)  # clean: handed on to the caller
        n = min(len(batch.rows), self.host.rows)
        t[:n] = torch.tensor(batch.rows[:n])
        t[n:] = 0
        return t

    def _on_device(self, batch: Batch) -> torch.Tensor:
        stage = self._staged(batch)  # clean: handed back after the copy
        out = self.dev.rent(batch.cols)  # clean: handed on to the caller
        out.copy_(stage)
        self.host.hand_back(stage)
        return out

    def launch(self, batch: Batch) -> None:
        stage = self._staged(batch)  # clean: near miss, poll() hands it back from the queue
        out = self.dev.rent(batch.cols)  # leak: poll() copies it out and lets it fall
        out.copy_(stage, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.flying.append(InFlight(batch, stage, out, event))

    def poll(self) -> List[Tuple[str, torch.Tensor]]:
        ready: List[Tuple[str, torch.Tensor]] = []
        while self.flying and self.flying[0].event.query():
            item = self.flying.popleft()
            self.host.hand_back(item.stage)
            ready.append((item.batch.topic, item.out.sum(dim=0)))
        return ready

    def column_max(self, batch: Batch) -> torch.Tensor:
        data = self._on_device(batch)  # leak: replaced by its own maximum
        data = data.max(dim=0).values
        return data.cpu()

    def snapshot(self, batch: Batch) -> torch.Tensor:
        return self._on_device(batch).clone()  # leak: the clone is returned, the pooled tensor dropped

    def normalized(self, batch: Batch, eps: float = 1e-6) -> Optional[torch.Tensor]:
        data = self._on_device(batch)  # clean: near miss, handed back before both returns
        spread = data.std(dim=0)
        if bool((spread < eps).any()):
            self.dev.hand_back(data)
            self.rejected += 1
            return None
        scaled = (data - data.mean(dim=0)) / spread
        self.dev.hand_back(data)
        return scaled

    def running_sum(self, batches: List[Batch], cols: int) -> torch.Tensor:
        acc = self.dev.rent(cols)  # leak: a batch of another width returns and keeps it
        acc.zero_()
        for b in batches:
            if b.cols != cols:
                self.rejected += 1
                return torch.zeros(cols)
            data = self._on_device(b)  # clean: handed back in the loop
            acc += data
            self.dev.hand_back(data)
        total = acc.sum(dim=0).cpu()
        self.dev.hand_back(acc)
        return total

    def ping_pong(self, batch: Batch, steps: int) -> float:
        a = self._on_device(batch)  # clean: near miss, the two only change names
        b = self.dev.rent(batch.cols)  # clean: near miss, both are handed back at the end
        for _ in range(steps):
            torch.mul(a, 0.5, out=b)
            a, b = b, a
        value = float(a.sum())
        self.dev.hand_back(a)
        self.dev.hand_back(b)
        return value

    def slices(self, batches: List[Batch], step: int) -> Iterator[torch.Tensor]:
        for batch in batches:
            data = self._on_device(batch)  # clean: handed back after its last slice
            try:
                for start in range(0, data.shape[0], step):
                    yield data[start:start + step].clone()
            finally:
                self.dev.hand_back(data)
