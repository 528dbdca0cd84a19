from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StagingConfig:
    num_slots: int = 8
    slot_bytes: int = 1 << 20
    pin: bool = False


class StagingPool:
    """Fixed set of flat host buffers used as the source and target of KV transfers."""

    def __init__(self, cfg: StagingConfig):
        self.cfg = cfg
        self._lock = threading.Lock()
        self._slots = [
            torch.empty(cfg.slot_bytes, dtype=torch.uint8, pin_memory=cfg.pin)
            for _ in range(cfg.num_slots)
        ]
        self._idle = list(range(cfg.num_slots))

    def obtain_slot(self) -> int:
        with self._lock:
            if not self._idle:
                return -1
            return self._idle.pop()

    def recycle_slot(self, slot: int) -> None:
        with self._lock:
            if slot in self._idle:
                raise RuntimeError(f"slot {slot} recycled twice")
            self._idle.append(slot)

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._slots[slot][:nbytes]
