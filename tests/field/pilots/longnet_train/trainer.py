from __future__ import annotations

from collections import deque
from typing import Deque, Iterable, Optional

import torch
from torch import Tensor, nn

from .attention import SegmentAttention
from .pool import SharedPool


class Trainer:
    def __init__(self, model: nn.Module, layers: list[SegmentAttention], pool: SharedPool, accumulate: int):
        self.model = model
        self.layers = layers
        self.pool = pool
        self.accumulate = accumulate
        self._losses: Deque[Tensor] = deque()
        self._staged: dict[int, Tensor] = {}

    def stage(self, batches: Iterable[Tensor]) -> None:
        for i, batch in enumerate(batches):
            if i in self._staged:
                self.pool.hand_in(self._staged.pop(i))
            buf = self.pool.rent(*batch.shape, dtype=batch.dtype)  # clean: near miss, an older batch of the place was handed in and train_epoch hands in this one
            buf.copy_(batch)
            self._staged[i] = buf

    def _loss(self, x: Tensor) -> Optional[Tensor]:
        cell = self.pool.rent(1, dtype=torch.float32)  # leak: the non-finite loss returns None with the cell rented
        loss = self.model(x).float().pow(2).mean()
        cell.copy_(loss.detach().view(1))
        if not torch.isfinite(cell).all():
            return None
        loss.backward()
        return cell

    def train_epoch(self) -> list[float]:
        log: list[float] = []
        for i in sorted(self._staged):
            x = self._staged.pop(i)
            cell = self._loss(x)  # clean: near miss, None is skipped after x is handed in, the rest waits in _losses till flush
            self.pool.hand_in(x)
            if cell is None:
                continue
            self._losses.append(cell)
            if len(self._losses) == self.accumulate:
                log.extend(self.flush())
        log.extend(self.flush())
        return log

    def flush(self) -> list[float]:
        out: list[float] = []
        while self._losses:
            cell = self._losses.popleft()
            out.append(float(cell))
            self.pool.hand_in(cell)
        return out

    def evaluate(self, batches: Iterable[Tensor], patience: int) -> float:
        worst, bad = 0.0, 0
        for batch in batches:
            buf = self.pool.rent(*batch.shape, dtype=batch.dtype)  # leak: the break upon lost patience passes by the hand_in
            buf.copy_(batch)
            with torch.no_grad():
                err = float(self.model(buf).float().abs().max())
            if err > worst:
                worst, bad = err, bad + 1
            if bad > patience:
                break
            self.pool.hand_in(buf)
        for layer in self.layers:
            layer.free()
        return worst
