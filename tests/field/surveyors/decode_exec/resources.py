from __future__ import annotations

from typing import Optional


class SeqSlotManager:
    def __init__(self, max_slots: int) -> None:
        self._free = set(range(max_slots))
        self._owner: dict[int, int] = {}

    def add_slot(self, request_id: int) -> Optional[int]:
        if not self._free:
            return None
        slot = self._free.pop()
        self._owner[slot] = request_id
        return slot

    def remove_slot(self, slot: int) -> None:
        del self._owner[slot]
        self._free.add(slot)


class KVCacheManager:
    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._free_pages = list(range(num_pages))

    def reserve_pages(self, tokens: int) -> Optional[list[int]]:
        need = -(-tokens // self.page_tokens)
        if need > len(self._free_pages):
            return None
        return [self._free_pages.pop() for _ in range(need)]

    def unreserve_pages(self, pages: list[int]) -> None:
        self._free_pages.extend(pages)
