from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional

import torch


@dataclass(eq=False)
class CommBuffer:
    data: torch.Tensor
    generation: int = 0


class CommBuffers:
    """Dispatch and combine buffers, registered once with the collective library."""

    def __init__(self, count: int, tokens: int, hidden: int, device: torch.device) -> None:
        self.tokens = tokens
        self._idle: List[CommBuffer] = [CommBuffer(torch.empty(tokens, hidden, device=device)) for _ in range(count)]

    def lease(self) -> Optional[CommBuffer]:
        if not self._idle:
            return None
        buf = self._idle.pop()
        buf.generation += 1
        return buf

    def lease_for(self, tokens: int) -> Optional[CommBuffer]:
        buf = self.lease()  # leak: more tokens than a buffer holds return without giving it up
        if buf is None or tokens > self.tokens:
            return None
        return buf

    def lease_zeroed(self) -> Optional[CommBuffer]:
        buf = self.lease()  # clean: near miss, handed on to the caller in both ways
        if buf is not None:
            buf.data.zero_()
        return buf

    def give_up(self, buf: CommBuffer) -> None:
        self._idle.append(buf)


class ExpertResidency:
    """Which experts are on the device; a resident expert in use must not be moved out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._use: Dict[int, int] = {}
        self._resident: List[int] = []

    def enter(self, expert: int) -> bool:
        if expert not in self._resident:
            if len(self._resident) >= self.capacity and not self._make_room():
                return False
            self._resident.append(expert)
        self._use[expert] = self._use.get(expert, 0) + 1
        return True

    def exit(self, expert: int) -> None:
        self._use[expert] -= 1

    def _make_room(self) -> bool:
        for expert in self._resident:
            if not self._use.get(expert):
                self._resident.remove(expert)
                return True
        return False
