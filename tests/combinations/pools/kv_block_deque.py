# take: P.carve(n)
# give: P.put_back(X)
# gets: optional
# type: BlockLedger

import logging
from collections import deque
from typing import Deque, List, Optional

logger = logging.getLogger(__name__)


class BlockLedger:
    """Hands out physical KV block ids; block 0 is the null block and never leaves."""

    def __init__(self, num_blocks: int, watermark: float = 0.01) -> None:
        self._idle: Deque[int] = deque(range(1, num_blocks))
        self._reserve = int(watermark * num_blocks)
        self.peak = 0
        self._total = num_blocks - 1

    @property
    def in_use(self) -> int:
        return self._total - len(self._idle)

    def carve(self, n: int) -> Optional[List[int]]:
        if len(self._idle) - n < self._reserve:
            logger.debug("carve(%d) refused, %d idle", n, len(self._idle))
            return None
        got = [self._idle.popleft() for _ in range(n)]
        self.peak = max(self.peak, self.in_use)
        return got

    def put_back(self, blocks: List[int]) -> None:
        # Reverse order: the tail of a sequence is evicted before its prefix.
        self._idle.extend(reversed(blocks))
