import heapq
from typing import List, Optional

import torch


class NodeArena:
    """Node ids of draft trees; lowest id first keeps the attention mask small."""

    def __init__(self, capacity: int):
        self.tokens = torch.zeros(capacity, dtype=torch.int64)
        self.parents = torch.full((capacity,), -1, dtype=torch.int64)
        self._heap: List[int] = list(range(capacity))

    def new_nodes(self, n: int) -> Optional[List[int]]:
        if n > len(self._heap):
            return None
        return [heapq.heappop(self._heap) for _ in range(n)]

    def del_nodes(self, nodes: List[int]) -> None:
        for x in nodes:
            self.parents[x] = -1
            heapq.heappush(self._heap, x)


class DraftSlots:
    def __init__(self, n: int):
        self._bitmap = [False] * n

    def enter(self) -> int:
        for i, busy in enumerate(self._bitmap):
            if not busy:
                self._bitmap[i] = True
                return i
        return -1

    def exit(self, i: int) -> None:
        self._bitmap[i] = False
