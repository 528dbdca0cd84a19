"""Memory tiers (HBM, host, disk) that hand out fixed-size pages."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional


@dataclass(eq=False)
class Page:
    tier: str
    index: int
    data: bytearray


class Tier:

    def __init__(self, name: str, num_pages: int, page_bytes: int) -> None:
        self.name = name
        self.page_bytes = page_bytes
        self._idle: List[Page] = [Page(name, i, bytearray(page_bytes)) for i in range(num_pages)]
        self._lock = threading.Lock()

    def grab(self) -> Optional[Page]:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def grab_many(self, n: int) -> Optional[List[Page]]:
        with self._lock:
            if len(self._idle) < n:
                return None
            return [self._idle.pop() for _ in range(n)]

    def relinquish(self, page: Page) -> None:
        with self._lock:
            self._idle.append(page)

    def relinquish_many(self, pages: List[Page]) -> None:
        for page in pages:
            self.relinquish(page)
