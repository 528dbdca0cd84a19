from collections import deque
from typing import Deque, Dict, List, Optional


class PagePool:
    def __init__(self, n: int):
        self._free: Deque[int] = deque(range(n))

    def __len__(self) -> int:
        return len(self._free)

    def get_pages(self, n: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        return [self._free.popleft() for _ in range(n)]

    def get_aligned(self, n: int, align: int) -> Optional[List[int]]:
        if len(self._free) < n:
            return None
        first = self._free.popleft()  # leak: a page that is not aligned is not put back before None is returned
        if first % align:
            return None
        rest = [self._free.popleft() for _ in range(n - 1)]
        return [first, *rest]

    def put_pages(self, pages: List[int]) -> None:
        self._free.extend(pages)


class SlotPool:
    def __init__(self, n: int):
        self._bitmap = [False] * n

    def occupy(self) -> Optional[int]:
        for i, used in enumerate(self._bitmap):
            if not used:
                self._bitmap[i] = True
                return i
        return None

    def vacate(self, i: int) -> None:
        self._bitmap[i] = False


class LoraSlots:
    def __init__(self, n: int):
        self._n = n
        self._by_id: Dict[int, int] = {}
        self._count: Dict[int, int] = {}

    def attach(self, lora_id: int) -> Optional[int]:
        slot = self._by_id.get(lora_id)
        if slot is None:
            used = {s for s, c in self._count.items() if c}
            free = [s for s in range(self._n) if s not in used]
            if not free:
                return None
            slot = free[0]
            self._by_id = {k: v for k, v in self._by_id.items() if v != slot}
            self._by_id[lora_id] = slot
        self._count[slot] = self._count.get(slot, 0) + 1
        return slot

    def detach(self, slot: int) -> None:
        self._count[slot] -= 1
