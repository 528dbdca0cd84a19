"""Block ids, flow control credits and the transfer record that carries both."""
from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import List, Optional, Set


class BlockPool:
    def __init__(self, count: int) -> None:
        self._free: Set[int] = set(range(count))

    def take(self, count: int) -> List[int]:
        """`count` block ids, or an empty list when there are not enough."""
        if len(self._free) < count:
            return []
        return [self._free.pop() for _ in range(count)]  # clean: the list goes to the caller

    def put(self, blocks: List[int]) -> None:
        self._free.update(blocks)


class CreditWindow:
    """Credits granted by the peer; consumed for each block in flight."""

    def __init__(self, window: int) -> None:
        self._cond = threading.Condition()
        self._credits = window

    def consume(self, count: int, timeout: float) -> bool:
        with self._cond:
            if not self._cond.wait_for(lambda: self._credits >= count, timeout):
                return False
            self._credits -= count  # clean: held by the caller until replenish
            return True

    def replenish(self, count: int) -> None:
        with self._cond:
            self._credits += count
            self._cond.notify_all()


@dataclass
class Transfer:
    request_id: str
    blocks: List[int] = field(default_factory=list)
    credits: int = 0
    error: Optional[str] = None
