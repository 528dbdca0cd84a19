from __future__ import annotations

from typing import Dict, Optional


class AdapterSlots:
    """GPU slots for LoRA weights."""

    def __init__(self, n: int) -> None:
        self._vacant = list(range(n))
        self._owner: Dict[int, str] = {}

    def claim(self, name: str) -> Optional[int]:
        if not self._vacant:
            return None
        slot = self._vacant.pop()
        self._owner[slot] = name
        return slot

    def vacate(self, slot: int) -> None:
        del self._owner[slot]
        self._vacant.append(slot)
