"""Streaming token dataset: generators over leased page buffers."""
from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor


class Page:
    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.used = 0

    def tokens(self) -> Tensor:
        usable = self.used - self.used % 4
        if usable == 0:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(self.data, dtype=torch.int32, count=usable // 4)


class PagePool:
    def __init__(self, pages: int, nbytes: int) -> None:
        self._pages = [Page(nbytes) for _ in range(pages)]
        self._cond = threading.Condition()

    def lease(self, wait: float = 10.0) -> Optional[Page]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._pages), wait):
                return None
            page = self._pages.pop()  # clean: goes to the caller
            page.used = 0
            return page

    def relinquish(self, page: Page) -> None:
        with self._cond:
            self._pages.append(page)
            self._cond.notify()

    @contextlib.contextmanager
    def leased(self) -> Iterator[Page]:
        page = self.lease()  # clean: near miss, the None case raises and every other way passes finally
        if page is None:
            raise TimeoutError("no page became free")
        try:
            yield page
        finally:
            self.relinquish(page)


class TokenFile:
    def __init__(self, path: Path, pool: PagePool) -> None:
        self.path = path
        self.pool = pool

    def _fill(self, fh, page: Page) -> bool:
        page.used = fh.readinto(page.data)
        return page.used > 0

    def pages(self) -> Iterator[Page]:
        """Yields leased pages; whoever iterates relinquishes them."""
        with open(self.path, "rb") as fh:  # clean: closed by the with block
            while True:
                page = self.pool.lease()  # clean: near miss, relinquished at end of file and otherwise yielded to the consumer
                if page is None:
                    return
                if not self._fill(fh, page):
                    self.pool.relinquish(page)
                    return
                yield page

    def pages_until(self, limit: int) -> Iterator[Page]:
        """Yields leased pages up to a byte limit; whoever iterates relinquishes them."""
        seen = 0
        with open(self.path, "rb") as fh:  # clean: closed by the with block
            while seen < limit:
                page = self.pool.lease()  # leak: at end of file the loop breaks with the empty page leased
                if page is None:
                    return
                if not self._fill(fh, page):
                    break
                seen += page.used
                yield page

    def count(self) -> int:
        total = 0
        for page in self.pages():  # clean: each page is relinquished in the body
            total += page.used // 4
            self.pool.relinquish(page)
        return total

    def histogram(self, vocab: int) -> Tensor:
        counts = torch.zeros(vocab, dtype=torch.long)
        for page in self.pages():  # leak: pages without tokens continue past the relinquish
            tokens = page.tokens()
            if tokens.numel() == 0:
                continue
            counts += torch.bincount(tokens.long(), minlength=vocab)[:vocab]
            self.pool.relinquish(page)
        return counts

    def batches(self, length: int) -> Iterator[Tensor]:
        for page in self.pages():  # clean: near miss, relinquished in finally although batches are yielded in between
            try:
                for piece in page.tokens().split(length):
                    yield piece.clone()
            finally:
                self.pool.relinquish(page)

    def find(self, token: int) -> int:
        base = 0
        for page in self.pages():  # clean: near miss, relinquished before the return
            tokens = page.tokens()
            where = (tokens == token).nonzero()
            base += tokens.numel()
            self.pool.relinquish(page)
            if where.numel():
                return base - tokens.numel() + int(where[0])
        return -1

    def peek(self) -> Optional[int]:
        page = self.pool.lease()  # leak: an empty file returns None with the page leased
        if page is None:
            return None
        with open(self.path, "rb") as fh:  # clean: closed by the with block
            if not self._fill(fh, page):
                return None
        first = int(page.tokens()[0])
        self.pool.relinquish(page)
        return first


class ShuffleBuffer:
    """Keeps a window of leased pages and emits them in random order."""

    def __init__(self, pool: PagePool, size: int, seed: int = 0) -> None:
        self.pool = pool
        self.size = size
        self.rng = torch.Generator().manual_seed(seed)
        self.window: List[Page] = []
        self.spare: Optional[Page] = None

    def run(self, source: TokenFile) -> Iterator[Tensor]:
        for page in source.pages():  # clean: near miss, kept in the window, from which each one is emitted or relinquished in close
            self.window.append(page)
            if len(self.window) >= self.size:
                yield self._emit()
        while self.window:
            yield self._emit()

    def _emit(self) -> Tensor:
        i = int(torch.randint(len(self.window), (1,), generator=self.rng))
        page = self.window.pop(i)
        out = page.tokens().clone()
        self.pool.relinquish(page)
        return out

    def hold_spare(self) -> bool:
        if self.spare is None:
            self.spare = self.pool.lease(0.1)  # clean: near miss, at most one is held and close relinquishes it
        return self.spare is not None

    def close(self) -> None:
        while self.window:
            self.pool.relinquish(self.window.pop())
        spare, self.spare = self.spare, None
        if spare is not None:
            self.pool.relinquish(spare)


def mapped_checksum(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)  # leak: an empty file returns with the descriptor open
    size = os.fstat(fd).st_size
    if size == 0:
        return 0
    view = mmap.mmap(fd, size, access=mmap.ACCESS_READ)  # clean: closed before the return
    total = sum(view[i] for i in range(0, size, 4096))
    view.close()
    os.close(fd)
    return total


def pad_to_page(pool: PagePool, chunks: Iterable[bytes]) -> int:
    written = 0
    with pool.leased() as page:  # clean: the with block relinquishes it
        for chunk in itertools.islice(chunks, 64):
            end = min(len(page.data), page.used + len(chunk))
            page.data[page.used : end] = chunk[: end - page.used]
            page.used = end
            written = end
    return written
