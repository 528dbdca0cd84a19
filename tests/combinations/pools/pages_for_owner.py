# take: P.extend(n, key)
# give: P.wipe_owner(key)
# gets: answer
# type: OwnedPages
from collections import defaultdict


class OwnedPages:
    """Page tables per request; extend() adds n pages to the owner's table or does nothing."""

    def __init__(self, total_pages: int):
        self._avail = list(range(total_pages - 1, -1, -1))
        self.tables = defaultdict(list)

    def can_extend(self, n: int) -> bool:
        return n <= len(self._avail)

    def extend(self, n: int, owner: str) -> bool:
        if not self.can_extend(n):
            return False
        for _ in range(n):
            self.tables[owner].append(self._avail.pop())
        return True

    def wipe_owner(self, owner: str) -> int:
        pages = self.tables.pop(owner, [])
        while pages:
            self._avail.append(pages.pop())
        return len(self._avail)
