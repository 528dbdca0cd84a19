"""Per-request page tables."""

from __future__ import annotations

from typing import Dict, List, Optional

from .stores import DeviceStore


class TableSet:
    def __init__(self, store: DeviceStore, page_tokens: int):
        self.store = store
        self.page_tokens = page_tokens
        self.rows: Dict[str, List[int]] = {}

    def cover(self, rid: str, tokens: int) -> bool:
        """Grow the row of a request until it covers `tokens`; what was added stays on failure."""
        row = self.rows.setdefault(rid, [])
        while len(row) * self.page_tokens < tokens:
            page = self.store.new_page()  # clean: near miss, a partly covered row is still in rows and wipe() lets it go
            if page is None:
                return False
            row.append(page)
        return True

    def cover_many(self, wants: Dict[str, int]) -> bool:
        """All requests of a step or none of them."""
        added: Dict[str, List[int]] = {}
        for rid, pages in wants.items():
            fresh = []
            for _ in range(pages):
                page = self.store.new_page()  # leak: the pages of the request under way are not let go, only those in `added`
                if page is None:
                    for done in added.values():
                        for p in done:
                            self.store.let_go(p)
                    return False
                fresh.append(page)
            added[rid] = fresh
        for rid, fresh in added.items():
            self.rows.setdefault(rid, []).extend(fresh)
        return True

    def share_prefix(self, src: str, dst: str, pages: int) -> List[int]:
        """References on the first pages of src, for the caller to put in a row."""
        return [self.store.hold(p) for p in self.rows[src][:pages]]  # clean: returned to the caller

    def unshare_last(self, rid: str) -> Optional[int]:
        """Copy-on-write; returns the page to copy to, None when it was private or nothing is left."""
        row = self.rows[rid]
        if not self.store.shared(row[-1]):
            return None
        page = self.store.new_page()  # clean: takes the last place of the row, whose reference is dropped
        if page is None:
            return None
        self.store.let_go(row[-1])
        row[-1] = page
        return page

    def wipe(self, rid: str) -> None:
        for page in self.rows.pop(rid, ()):
            self.store.let_go(page)
