from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Sequence

import numpy as np
import torch

from .slots import SharedSlots, Slot


class DecodeError(ValueError):
    pass


@dataclass
class Batch:
    parts: list[Slot] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(np.stack([s.array for s in self.parts]))


class Collator:
    def __init__(self, slots: SharedSlots, decode: Callable[[bytes, np.ndarray], int]) -> None:
        self.slots = slots
        self.decode = decode

    def give_back(self, batch: Batch) -> None:
        while batch.parts:
            self.slots.recycle(batch.parts.pop())
        batch.labels.clear()

    def collate(self, samples: Sequence[tuple[bytes, int]]) -> Batch | None:
        batch = Batch()
        for raw, label in samples:
            slot = self.slots.acquire(timeout=5.0)  # clean: near miss, recycled on a decode error, part of the batch otherwise, and a short batch is given back
            if slot is None:
                self.give_back(batch)
                return None
            try:
                slot.used = self.decode(raw, slot.array)
            except DecodeError:
                self.slots.recycle(slot)
                continue
            batch.parts.append(slot)
            batch.labels.append(label)
        return batch

    def collate_balanced(self, samples: Sequence[tuple[bytes, int]], per_class: int) -> Batch:
        batch = Batch()
        for raw, label in samples:
            slot = self.slots.acquire_for(len(raw), 5.0)  # leak: a sample of a full class is skipped after its slot was taken
            if slot is None:
                break
            if batch.labels.count(label) >= per_class:
                continue
            self.decode(raw, slot.array)
            batch.parts.append(slot)
            batch.labels.append(label)
        return batch

    def mean_size(self, samples: Sequence[tuple[bytes, int]]) -> float:
        batch = self.collate(samples)  # clean: given back once the sizes are added up
        if batch is None:
            return 0.0
        total = sum(s.used for s in batch.parts)
        n = max(len(batch.parts), 1)
        self.give_back(batch)
        return total / n
