from __future__ import annotations

from types import TracebackType
from typing import Dict, List, Optional, Type

import torch


class StagingPool:
    def __init__(self, blocks: int, block_bytes: int) -> None:
        pin = torch.cuda.is_available()
        self.block_bytes = block_bytes
        self._blocks = [torch.empty(block_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(blocks)]
        self._free: List[int] = list(range(blocks))
        self.owners: Dict[int, str] = {}

    def grab(self, owner: str) -> Optional[int]:
        if not self._free:
            return None
        block = self._free.pop()
        self.owners[block] = owner
        return block

    def drop(self, block: int) -> None:
        del self.owners[block]
        self._free.append(block)

    def tensor(self, block: int) -> torch.Tensor:
        return self._blocks[block]


class StagingLease:
    def __init__(self, pool: StagingPool, owner: str, spare: bool = False) -> None:
        self.pool = pool
        self.owner = owner
        self.spare = spare
        self.main: Optional[int] = None
        self.extra: Optional[int] = None

    def __enter__(self) -> "StagingLease":
        self.main = self.pool.grab(self.owner)  # clean: near miss, __exit__ drops it before its early return
        if self.spare:
            self.extra = self.pool.grab(self.owner)  # leak: __exit__ returns early on an error before extra is dropped
        return self

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        tb: Optional[TracebackType],
    ) -> bool:
        if self.main is not None:
            self.pool.drop(self.main)
            self.main = None
        if exc_type is not None:
            return issubclass(exc_type, BlockingIOError)
        if self.extra is not None:
            self.pool.drop(self.extra)
            self.extra = None
        return False
