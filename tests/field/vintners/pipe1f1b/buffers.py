"""Slots for stashed activations and reusable point-to-point buffers."""
from __future__ import annotations

from typing import Dict, List, Optional, Tuple

import torch

Shape = Tuple[int, ...]


class SlotTable:
    """Integer slots into one big activation tensor; slot -1 means none."""

    NONE = -1

    def __init__(self, n_slots: int, shape: Shape, dtype: torch.dtype, device: str) -> None:
        self.store = torch.empty((n_slots, *shape), dtype=dtype, device=device)
        self._used = [False] * n_slots

    def claim(self) -> int:
        for i, used in enumerate(self._used):
            if not used:
                self._used[i] = True
                return i
        return self.NONE

    def claim_pair(self) -> Optional[Tuple[int, int]]:
        """One slot for the input and one for the output of a micro-batch, or nothing."""
        first = self.claim()  # leak: kept marked when the second claim is refused
        if first == self.NONE:
            return None
        second = self.claim()  # clean: goes to the caller in the pair
        if second == self.NONE:
            return None
        return first, second

    def claim_run(self, n: int) -> List[int]:
        """n slots at once, all or none."""
        got: List[int] = []
        for _ in range(n):
            slot = self.claim()  # clean: near miss, the roll-back loop vacates what was taken
            if slot == self.NONE:
                for s in got:
                    self.vacate(s)
                return []
            got.append(slot)
        return got

    def vacate(self, slot: int) -> None:
        if not self._used[slot]:
            raise ValueError(f"slot {slot} is not in use")
        self._used[slot] = False

    def view(self, slot: int) -> torch.Tensor:
        return self.store[slot]


class P2PBuffers:
    """Receive and send buffers, kept by shape and reused."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._idle: Dict[Shape, List[torch.Tensor]] = {}
        self.outstanding = 0

    def checkout(self, shape: Shape) -> torch.Tensor:
        self.outstanding += 1
        shelf = self._idle.get(shape)
        if shelf:
            return shelf.pop()
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def checkin(self, buf: torch.Tensor) -> None:
        self.outstanding -= 1
        self._idle.setdefault(tuple(buf.shape), []).append(buf)
