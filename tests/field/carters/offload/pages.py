from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass(eq=False)
class PageLease:
    pages: list[int]
    tag: str
    data: bytes = b""
    open: bool = True

    @property
    def count(self) -> int:
        return len(self.pages)


class HostPages:
    """Host memory for swapped-out KV and optimizer shards."""

    def __init__(self, total: int, page_bytes: int = 4) -> None:
        self.page_bytes = page_bytes
        self._free = list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def lease(self, nbytes: int, tag: str) -> Optional[PageLease]:
        n = max(1, -(-nbytes // self.page_bytes))
        if n > len(self._free):
            return None
        pages, self._free = self._free[:n], self._free[n:]
        return PageLease(pages, tag)

    def surrender(self, lease: PageLease) -> None:
        if not lease.open:
            raise ValueError(f"{lease.tag} surrendered twice")
        lease.open = False
        self._free.extend(lease.pages)

    def shrink(self, lease: PageLease, nbytes: int) -> None:
        keep = max(1, -(-nbytes // self.page_bytes))
        self._free.extend(lease.pages[keep:])
        del lease.pages[keep:]

    def relocate(self, lease: PageLease, nbytes: int) -> Optional[PageLease]:
        """A bigger lease with the data of the old one, which is given up."""
        bigger = self.lease(nbytes, lease.tag)  # clean: returned
        if bigger is None:
            return None
        bigger.data = lease.data
        self.surrender(lease)
        return bigger
