"""Block stores; ids are integers, contents live in one tensor per store."""
from __future__ import annotations

from typing import List, Optional

import torch


class _Store:
    def __init__(self, n: int, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(n, *shape, dtype=dtype, device=device)
        self._ids = list(range(n))

    def issue(self) -> Optional[int]:
        return self._ids.pop() if self._ids else None  # clean: handed to the caller

    def remit(self, bid: int) -> None:
        self._ids.append(bid)

    @property
    def idle(self) -> int:
        return len(self._ids)


class DeviceBlocks(_Store):
    """Prefix blocks are shared; `share` adds a holder, `remit` removes one."""

    def __init__(self, *args, **kw) -> None:
        super().__init__(*args, **kw)
        self._extra: dict = {}

    def share(self, bid: int) -> int:
        self._extra[bid] = self._extra.get(bid, 0) + 1
        return bid

    def remit(self, bid: int) -> None:
        k = self._extra.get(bid, 0)
        if k:
            self._extra[bid] = k - 1
        else:
            super().remit(bid)

    def issue_n(self, n: int) -> List[int]:
        if self.idle < n:
            return []
        return [self.issue() for _ in range(n)]  # clean: counted before, all handed to the caller


class HostBlocks(_Store):
    pass
