"""In-memory vector index on pages: documents own chains of pages, queries borrow scratch pages."""
from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Optional, Sequence

import torch

log = logging.getLogger("index")


class PagePool:
    def __init__(self, pages: int, rows: int, width: int) -> None:
        self.rows = rows
        self.width = width
        self.storage = torch.zeros(pages, rows, width)
        self._stack = list(range(pages))

    def available(self) -> int:
        return len(self._stack)

    def allocate(self) -> int:
        if not self._stack:
            raise MemoryError("index is full")
        return self._stack.pop()

    def allocate_many(self, count: int) -> list[int]:
        if len(self._stack) < count:
            raise MemoryError("index is full")
        cut = len(self._stack) - count
        taken = self._stack[cut:]
        del self._stack[cut:]
        return taken

    def release(self, page: int) -> None:
        self.storage[page].zero_()
        self._stack.append(page)

    def release_many(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.release(page)


@dataclass
class Document:
    ident: str
    pages: list[int] = field(default_factory=list)
    rows: int = 0
    summary: Optional[int] = None


class VectorIndex:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.documents: dict[str, Document] = {}
        self.aliases: dict[str, str] = {}
        self._codebook: Optional[int] = None

    def _pages_for(self, rows: int) -> int:
        return -(-rows // self.pool.rows)

    def add(self, ident: str, vectors: torch.Tensor) -> Document:
        if ident in self.documents:
            self.remove(ident)
        document = Document(ident, rows=vectors.shape[0])
        for start in range(0, vectors.shape[0], self.pool.rows):
            page = self.pool.allocate()  # clean: near miss, the document owns it, remove() releases the chain
            document.pages.append(page)
            part = vectors[start : start + self.pool.rows]
            self.pool.storage[page, : part.shape[0]] = part
        self.documents[ident] = document
        return document

    def summarise(self, ident: str) -> None:
        document = self.documents[ident]
        if document.summary is None:
            document.summary = self.pool.allocate()  # leak: remove() releases the chain but not the summary page
        mean = torch.stack([self.pool.storage[p].mean(dim=0) for p in document.pages]).mean(dim=0)
        self.pool.storage[document.summary, 0] = mean

    def remove(self, ident: str) -> bool:
        document = self.documents.pop(ident, None)
        if document is None:
            return False
        self.pool.release_many(document.pages)
        document.pages.clear()
        for alias in [a for a, target in self.aliases.items() if target == ident]:
            del self.aliases[alias]
        return True

    def set_codebook(self, centres: torch.Tensor) -> None:
        page = self.pool.allocate()  # clean: near miss, the page before is released, close() releases the last
        self.pool.storage[page, : centres.shape[0]] = centres
        if self._codebook is not None:
            self.pool.release(self._codebook)
        self._codebook = page

    def close(self) -> None:
        for ident in list(self.documents):
            self.remove(ident)
        if self._codebook is not None:
            self.pool.release(self._codebook)
            self._codebook = None

    # queries -----------------------------------------------------------------------------------------------
    def search(self, query: torch.Tensor, top: int) -> list[tuple[float, str]]:
        scratch = self.pool.allocate()  # leak: an empty index returns an empty list before the release
        self.pool.storage[scratch, 0] = query
        if not self.documents:
            return []
        scored = []
        for document in self.documents.values():
            best = max(float((self.pool.storage[p] @ self.pool.storage[scratch, 0]).max()) for p in document.pages)
            scored.append((best, document.ident))
        self.pool.release(scratch)
        return heapq.nlargest(top, scored)

    def search_filtered(self, query: torch.Tensor, allowed: set[str]) -> Optional[str]:
        if not self.documents:
            return None
        scratch = self.pool.allocate()  # clean: released in finally
        try:
            self.pool.storage[scratch, 0] = query
            best, winner = float("-inf"), None
            for ident, document in self.documents.items():
                if ident not in allowed:
                    continue
                score = sum(float((self.pool.storage[p] @ query).max()) for p in document.pages)
                if score > best:
                    best, winner = score, ident
            if winner is None:
                return None
            return winner
        finally:
            self.pool.release(scratch)

    def rewrite(self, ident: str, vectors: torch.Tensor) -> bool:
        document = self.documents.get(ident)
        if document is None:
            return False
        fresh = self.pool.allocate_many(self._pages_for(vectors.shape[0]))  # clean: near miss, old chain is released
        for number, page in enumerate(fresh):
            part = vectors[number * self.pool.rows : (number + 1) * self.pool.rows]
            self.pool.storage[page, : part.shape[0]] = part
        self.pool.release_many(document.pages)
        document.pages = fresh
        document.rows = vectors.shape[0]
        return True

    def extend(self, ident: str, vectors: torch.Tensor) -> bool:
        fresh = self.pool.allocate_many(self._pages_for(vectors.shape[0]))  # leak: unknown document loses them
        document = self.documents.get(ident)
        if document is None:
            log.warning("extend of unknown document %s", ident)
            return False
        for number, page in enumerate(fresh):
            part = vectors[number * self.pool.rows : (number + 1) * self.pool.rows]
            self.pool.storage[page, : part.shape[0]] = part
        document.pages.extend(fresh)
        document.rows += vectors.shape[0]
        return True

    def truncate(self, ident: str, rows: int) -> int:
        document = self.documents[ident]
        keep = self._pages_for(rows)
        surplus = document.pages[keep:]
        del document.pages[keep:]
        self.pool.release_many(surplus)
        document.rows = min(document.rows, rows)
        return len(surplus)

    def bulk_load(self, items: Mapping[str, torch.Tensor]) -> int:
        total = sum(self._pages_for(v.shape[0]) for v in items.values())
        if total == 0 or total > self.pool.available():
            return 0
        reserve = self.pool.allocate_many(total)  # clean: near miss, split over documents that remove() releases
        for ident, vectors in items.items():
            self.remove(ident)
            count = self._pages_for(vectors.shape[0])
            pages, reserve = reserve[:count], reserve[count:]
            for number, page in enumerate(pages):
                part = vectors[number * self.pool.rows : (number + 1) * self.pool.rows]
                self.pool.storage[page, : part.shape[0]] = part
            self.documents[ident] = Document(ident, pages, vectors.shape[0])
        return total


def kmeans(pool: PagePool, vectors: Sequence[torch.Tensor], centres: int, rounds: int) -> torch.Tensor:
    work = pool.allocate()  # clean: released after the rounds, the result is a clone
    sums = pool.allocate()  # leak: only the work page is released
    for row in range(centres):
        pool.storage[work, row] = vectors[row]
    for _ in range(rounds):
        pool.storage[sums].zero_()
        counts = torch.zeros(centres)
        for vector in vectors:
            nearest = int((pool.storage[work, :centres] - vector).norm(dim=1).argmin())
            pool.storage[sums, nearest] += vector
            counts[nearest] += 1
        pool.storage[work, :centres] = pool.storage[sums, :centres] / counts.clamp_min(1)[:, None]
    result = pool.storage[work, :centres].clone()
    pool.release(work)
    return result


def calibrate(pool: PagePool, samples: Iterable[torch.Tensor]) -> float:
    spread = 0.0
    page = -1
    for sample in samples:
        page = pool.allocate()  # leak: one page for every sample, only the last one is released
        pool.storage[page, 0] = sample
        spread = max(spread, float(sample.std()))
    if page >= 0:
        pool.release(page)
    return spread
