"""Shared memory segments for batches travelling from loader workers to the trainer."""
from __future__ import annotations

import logging
import multiprocessing as mp
from dataclasses import dataclass
from typing import Any, Iterable, Iterator

import numpy as np
import torch

logger = logging.getLogger(__name__)


@dataclass
class Segment:
    sid: int
    array: np.ndarray
    length: int = 0


class SegmentPool:
    def __init__(self, count: int, numel: int) -> None:
        self._segments = [Segment(i, np.zeros(numel, dtype=np.float32)) for i in range(count)]
        self._free = mp.SimpleQueue()
        for s in self._segments:
            self._free.put(s.sid)

    def get_segment(self) -> Segment:
        return self._segments[self._free.get()]

    def try_get_segment(self) -> Segment | None:
        if self._free.empty():
            return None
        return self._segments[self._free.get()]

    def put_segment(self, seg: Segment) -> None:
        seg.length = 0
        self._free.put(seg.sid)


class Loader:
    def __init__(self, dataset: Iterable[Any], pool: SegmentPool, batch_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.pool = pool
        self.batch_size = batch_size
        self.drop_last = drop_last

    def _fill(self, seg: Segment, samples: list[Any]) -> Segment:
        flat = np.concatenate([np.asarray(s, dtype=np.float32).ravel() for s in samples])
        seg.array[: flat.size] = flat
        seg.length = flat.size
        return seg

    def batches(self) -> Iterator[torch.Tensor]:
        samples: list[Any] = []
        for sample in self.dataset:
            samples.append(sample)
            if len(samples) < self.batch_size:
                continue
            seg = self.pool.get_segment()  # clean: put back when the consumer asks for the next batch
            try:
                self._fill(seg, samples)
                yield torch.from_numpy(seg.array[: seg.length])
            finally:
                self.pool.put_segment(seg)
            samples = []
        if samples and not self.drop_last:
            seg = self.pool.get_segment()  # clean: put back after the last batch
            yield torch.from_numpy(self._fill(seg, samples).array[: seg.length])
            self.pool.put_segment(seg)

    def batches_tail(self) -> Iterator[torch.Tensor]:
        samples: list[Any] = []
        seg = self.pool.get_segment()  # leak: the unfinished last batch with drop_last returns before the put
        for sample in self.dataset:
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield torch.from_numpy(self._fill(seg, samples).array[: seg.length]).clone()
                samples = []
        if samples and self.drop_last:
            logger.info("dropping %d samples", len(samples))
            return
        if samples:
            yield torch.from_numpy(self._fill(seg, samples).array[: seg.length]).clone()
        self.pool.put_segment(seg)

    def segments(self) -> Iterator[Segment]:
        """The consumer puts the segments back."""
        samples: list[Any] = []
        for sample in self.dataset:
            samples.append(sample)
            if len(samples) == self.batch_size:
                seg = self.pool.get_segment()  # clean: yielded to the consumer, which owns it
                yield self._fill(seg, samples)
                samples = []


class Trainer:
    def __init__(self, loader: Loader, model: torch.nn.Module, max_norm: float) -> None:
        self.loader = loader
        self.model = model
        self.max_norm = max_norm
        self.skipped = 0

    def epoch(self) -> float:
        loss = 0.0
        for seg in self.loader.segments():  # clean: each round puts its segment back
            x = torch.from_numpy(seg.array[: seg.length]).clone()
            self.loader.pool.put_segment(seg)
            loss += float(self.model(x).mean())
        return loss

    def epoch_skipping(self) -> float:
        loss = 0.0
        for seg in self.loader.segments():  # leak: rounds with a large norm continue without the put
            x = torch.from_numpy(seg.array[: seg.length])
            if float(x.norm()) > self.max_norm:
                self.skipped += 1
                continue
            loss += float(self.model(x).mean())
            self.loader.pool.put_segment(seg)
        return loss

    def overfit(self, steps: int, sample: np.ndarray) -> list[float]:
        seg = self.loader.pool.try_get_segment()  # clean: near miss, diverging breaks to the put
        if seg is None:
            return []
        losses: list[float] = []
        seg.array[: sample.size] = sample
        for _ in range(steps):
            losses.append(float(self.model(torch.from_numpy(seg.array[: sample.size])).mean()))
            if losses[-1] > 1e6:
                break
        self.loader.pool.put_segment(seg)
        return losses

    def sanity(self) -> bool:
        seg = self.loader.pool.try_get_segment()  # leak: a segment with a stale length raises before the put
        if seg is None:
            return False
        if seg.length != 0:
            raise RuntimeError(f"segment {seg.sid} was not reset")
        self.loader.pool.put_segment(seg)
        return True
