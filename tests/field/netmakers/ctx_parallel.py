"""Context-parallel sequence planner: maps documents to page tables on each CP rank.

Pages are counted so that documents with the same prompt share a prefix.
"""
from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


class PageBook:
    """Page numbers with reference counts; 0 means the page is free."""

    def __init__(self, n_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.refs = [0] * n_pages
        self._cursor = 0

    def draw(self) -> int | None:
        n = len(self.refs)
        for i in range(n):
            p = (self._cursor + i) % n
            if self.refs[p] == 0:
                self.refs[p] = 1
                self._cursor = p + 1
                return p
        return None

    def draw_run(self, count: int) -> list[int] | None:
        run: list[int] = []
        for _ in range(count):
            p = self.draw()  # leak: a run that comes up short returns None with the drawn pages
            if p is None:
                return None
            run.append(p)
        return run

    def draw_upto(self, count: int) -> list[int]:
        run: list[int] = []
        while len(run) < count:
            p = self.draw()  # clean: near miss, the pages drawn so far are returned to the caller
            if p is None:
                break
            run.append(p)
        return run

    def share(self, page: int) -> int:
        self.refs[page] += 1
        return page

    def cede(self, page: int) -> None:
        if self.refs[page] <= 0:
            raise ValueError(f"page {page} is free")
        self.refs[page] -= 1

    def free_pages(self) -> int:
        return sum(r == 0 for r in self.refs)


@dataclass
class Doc:
    doc_id: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    prefix_len: int = 0
    priority: int = 0


class PrefixIndex:
    """Full pages by the hash of the tokens up to their end. The index keeps a reference of its own."""

    def __init__(self, book: PageBook) -> None:
        self.book = book
        self._by_hash: dict[int, int] = {}

    def match(self, tokens: list[int]) -> list[int]:
        """Pages of the longest known prefix, one reference each for the caller."""
        hit: list[int] = []
        for end in range(self.book.page_tokens, len(tokens) + 1, self.book.page_tokens):
            page = self._by_hash.get(hash(tuple(tokens[:end])))
            if page is None:
                break
            hit.append(self.book.share(page))  # clean: returned to the caller in the list
        return hit

    def insert(self, doc: Doc) -> None:
        pt = self.book.page_tokens
        for i in range(len(doc.tokens) // pt):
            h = hash(tuple(doc.tokens[: (i + 1) * pt]))
            page = self.book.share(doc.pages[i])  # leak: a hash that is present already continues with the extra reference
            if h in self._by_hash:
                continue
            self._by_hash[h] = page

    def drop_all(self) -> None:
        for page in self._by_hash.values():
            self.book.cede(page)
        self._by_hash.clear()

    def coverage(self, tokens: list[int]) -> float:
        hit = self.match(tokens)  # leak: only the number of pages is used, the references stay
        return len(hit) * self.book.page_tokens / max(1, len(tokens))


class Planner:
    def __init__(self, book: PageBook, index: PrefixIndex, cp_size: int) -> None:
        self.book = book
        self.index = index
        self.cp_size = cp_size
        self.running: dict[int, Doc] = {}
        self.waiting: list[Doc] = []

    def _need(self, doc: Doc, have: int) -> int:
        return -(-len(doc.tokens) // self.book.page_tokens) - have

    def admit(self, doc: Doc) -> bool:
        prefix = self.index.match(doc.tokens)  # clean: near miss, ceded when there are too few pages, else moved into doc.pages
        need = self._need(doc, len(prefix))
        if self.book.free_pages() < need:
            for p in prefix:
                self.book.cede(p)
            self.waiting.append(doc)
            return False
        doc.prefix_len = len(prefix) * self.book.page_tokens
        doc.pages = prefix + self.book.draw_upto(need)  # clean: moved into doc.pages, ceded by finish
        self.running[doc.doc_id] = doc
        return True

    def admit_urgent(self, doc: Doc) -> bool:
        prefix = self.index.match(doc.tokens)  # leak: no rollback of the shared prefix when nobody can be preempted
        need = self._need(doc, len(prefix))
        while self.book.free_pages() < need:
            if not self._preempt(below=doc.priority):
                return False
        doc.pages = prefix + self.book.draw_upto(need)  # clean: moved into doc.pages, ceded by finish
        self.running[doc.doc_id] = doc
        return True

    def _preempt(self, below: int) -> bool:
        victim = min(self.running.values(), key=lambda d: d.priority, default=None)
        if victim is None or victim.priority >= below:
            return False
        self.finish(victim.doc_id)
        self.waiting.append(victim)
        return True

    def finish(self, doc_id: int) -> None:
        doc = self.running.pop(doc_id)
        for p in doc.pages:
            self.book.cede(p)
        doc.pages = []

    def append_token(self, doc: Doc, token: int) -> bool:
        if len(doc.tokens) % self.book.page_tokens == 0:
            page = self.book.draw()  # clean: kept in doc.pages whenever it is not None
            if page is None:
                return False
            doc.pages.append(page)
        doc.tokens.append(token)
        return True

    def unshare_last(self, doc: Doc) -> bool:
        """Copy on write of the last page."""
        last = doc.pages[-1]
        fresh = self.book.draw()  # leak: not ceded when the page turns out to be private
        if fresh is None:
            return False
        if self.book.refs[last] == 1:
            return True
        doc.pages[-1] = fresh
        self.book.cede(last)
        return True

    def schedule(self) -> list[Doc]:
        started, pending = [], self.waiting
        self.waiting = []
        for doc in sorted(pending, key=lambda d: -d.priority):
            if self.admit(doc):
                started.append(doc)
        return started

    def layout(self, doc: Doc) -> list[list[int]]:
        """Zigzag split of the pages over the CP ranks."""
        chunks = [doc.pages[i::2 * self.cp_size] for i in range(2 * self.cp_size)]
        return [chunks[r] + chunks[2 * self.cp_size - 1 - r] for r in range(self.cp_size)]
