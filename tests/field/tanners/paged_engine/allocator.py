from __future__ import annotations

from typing import List, Optional

from .request import Request


class FreeList:
    """Numbered things; get() raises when empty unless told otherwise."""

    def __init__(self, n: int, name: str) -> None:
        self.name = name
        self._ids = list(range(n))

    def get(self) -> int:
        if not self._ids:
            raise LookupError(self.name)
        return self._ids.pop()

    def get_or_none(self) -> Optional[int]:
        return self._ids.pop() if self._ids else None

    def put(self, i: int) -> None:
        self._ids.append(i)

    def __len__(self) -> int:
        return len(self._ids)


class BlockAllocator:
    def __init__(self, n: int, block: int = 4) -> None:
        self.device = FreeList(n, "device blocks")
        self.host = FreeList(n, "host blocks")
        self.block = block

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def reserve(self, n: int) -> Optional[List[int]]:
        if len(self.device) < n:
            return None
        return [self.device.get() for _ in range(n)]  # clean: near miss, length was checked, list handed on

    def reserve_host(self, n: int) -> Optional[List[int]]:
        ids: List[int] = []
        try:
            while len(ids) < n:
                ids.append(self.host.get())  # leak: running out part way returns None with ids taken
        except LookupError:
            return None
        return ids

    def unreserve(self, ids: List[int]) -> None:
        while ids:
            self.device.put(ids.pop())

    def unreserve_host(self, ids: List[int]) -> None:
        for i in ids:
            self.host.put(i)

    def ensure(self, req: Request) -> bool:
        """Grow the request's table to its length."""
        missing = self.blocks_for(req.length + 1) - len(req.blocks)
        if missing <= 0:
            return True
        more = self.reserve(missing)  # clean: extends the request's own table
        if more is None:
            return False
        req.blocks.extend(more)
        return True
