"""Page pools. `carve` takes page numbers, `refill` puts them back."""
from __future__ import annotations

import torch


class PagePool:
    def __init__(self, pages: int, width: int, device: str = "cpu"):
        self.store = torch.zeros(pages, width, device=device)
        self._avail = torch.arange(pages)

    def available(self) -> int:
        return int(self._avail.numel())

    def carve(self, n: int) -> torch.Tensor | None:
        if n > self.available():
            return None
        out, self._avail = self._avail[:n], self._avail[n:]  # clean: the pages cut off are returned
        return out

    def carve_contiguous(self, n: int) -> torch.Tensor | None:
        """`n` neighbouring pages or None."""
        if n > self.available():
            return None
        self._avail = self._avail.sort().values
        out, self._avail = self._avail[:n], self._avail[n:]  # leak: pages with a gap are not put back when None is returned
        if n and int(out[-1] - out[0]) != n - 1:
            return None
        return out

    def refill(self, pages: torch.Tensor) -> None:
        self._avail = torch.cat([self._avail, pages])
