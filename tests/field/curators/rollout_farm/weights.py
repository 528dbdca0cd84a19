from __future__ import annotations

import logging
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import torch

logger = logging.getLogger(__name__)


class StagingRing:
    """Equal slots of one flat buffer; a slot is busy from `claim` to `retire`."""

    def __init__(self, slots: int, numel: int) -> None:
        self.numel = numel
        self.flat = torch.zeros(slots, numel)
        self._busy: List[bool] = [False] * slots

    def claim(self) -> Optional[int]:
        for i, busy in enumerate(self._busy):
            if not busy:
                self._busy[i] = True
                return i
        return None

    def retire(self, slot: int) -> None:
        self._busy[slot] = False


class WeightSync:
    def __init__(self, ring: StagingRing, push: Callable[[str, torch.Tensor], bool]) -> None:
        self.ring = ring
        self.push = push
        self.staged: Dict[str, int] = {}
        self.failed: List[str] = []

    def _claim(self, name: str) -> Optional[int]:
        slot = self.ring.claim()  # clean: handed on to the caller
        if slot is None:
            logger.debug("no staging slot for %s", name)
        return slot

    def stage(self, name: str, tensor: torch.Tensor) -> bool:
        slot = self._claim(name)  # leak: a name staged twice before the flush overwrites the earlier slot
        if slot is None:
            return False
        self.ring.flat[slot, : tensor.numel()].copy_(tensor.reshape(-1))
        self.staged[name] = slot
        return True

    def restage(self, name: str, tensor: torch.Tensor) -> bool:
        slot = self.staged.get(name)
        if slot is None:
            slot = self._claim(name)  # clean: near miss, only for a name not staged, and flush retires it
            if slot is None:
                return False
            self.staged[name] = slot
        self.ring.flat[slot, : tensor.numel()].copy_(tensor.reshape(-1))
        return True

    def flush(self) -> int:
        pushed = 0
        for name, slot in self.staged.items():
            if self.push(name, self.ring.flat[slot]):
                pushed += 1
            else:
                self.failed.append(name)
            self.ring.retire(slot)
        self.staged.clear()
        return pushed

    def stream(self, named: Iterable[Tuple[str, torch.Tensor]]) -> int:
        sent = 0
        for name, tensor in named:
            slot = self._claim(name)  # leak: a refused push continues past the retire
            if slot is None:
                break
            self.ring.flat[slot, : tensor.numel()].copy_(tensor.reshape(-1))
            if not self.push(name, self.ring.flat[slot]):
                self.failed.append(name)
                continue
            self.ring.retire(slot)
            sent += 1
        return sent

    def push_pair(self, a: Tuple[str, torch.Tensor], b: Tuple[str, torch.Tensor]) -> bool:
        first = self._claim(a[0])  # clean: near miss, retired when the second claim fails
        if first is None:
            return False
        second = self._claim(b[0])  # clean: retired below with the first one
        if second is None:
            self.ring.retire(first)
            return False
        ok = True
        for slot, (name, tensor) in ((first, a), (second, b)):
            self.ring.flat[slot, : tensor.numel()].copy_(tensor.reshape(-1))
            ok = self.push(name, self.ring.flat[slot]) and ok
            self.ring.retire(slot)
        return ok
