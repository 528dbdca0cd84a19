"""Guided decoding: compiled matcher instances and vocabulary bitmasks, filled on a thread pool."""
from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import numpy as np

logger = logging.getLogger("guided")


class MaskPool:
    """Rows of one big bitmask array. A row is named by its index."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.data = np.zeros((rows, (vocab + 31) // 32), dtype=np.int32)
        self._stack = list(range(rows - 1, -1, -1))
        self._mu = threading.Lock()

    def reserve_row(self) -> Optional[int]:
        self._mu.acquire()  # leak: not released on the empty stack's return
        if not self._stack:
            return None
        row = self._stack.pop()
        self._mu.release()
        return row

    def return_row(self, row: int) -> None:
        self._mu.acquire()  # clean: released in finally
        try:
            self.data[row].fill(0)
            self._stack.append(row)
        finally:
            self._mu.release()

    def rows_left(self) -> int:
        self._mu.acquire()  # clean: released after the length is read
        n = len(self._stack)
        self._mu.release()
        return n


class MatcherShelf:
    """Matchers by grammar key, reset before they go back on the shelf."""

    def __init__(self, compile_fn: Callable[[str], Any], limit: int) -> None:
        self._compile = compile_fn
        self._shelves: Dict[str, List[Any]] = {}
        self._slots = threading.BoundedSemaphore(limit)

    def fetch(self, key: str) -> Any:
        self._slots.acquire()  # clean: released when compiling fails, else by shelve()
        lst = self._shelves.get(key)
        if lst:
            return lst.pop()
        try:
            return self._compile(key)
        except ValueError:
            self._slots.release()
            raise

    def fetch_cached(self, key: str) -> Optional[Any]:
        if not self._slots.acquire(blocking=False):  # leak: the slot isn't released when nothing is shelved
            return None
        lst = self._shelves.get(key)
        if not lst:
            return None
        return lst.pop()

    def shelve(self, key: str, m: Any) -> None:
        m.reset()
        self._shelves.setdefault(key, []).append(m)
        self._slots.release()


@dataclass
class Guided:
    rid: str
    key: str
    matcher: Any = None
    row: Optional[int] = None
    pending: Optional[Future] = None
    finished: bool = False


class GuidedManager:
    def __init__(self, masks: MaskPool, shelf: MatcherShelf, workers: int = 4) -> None:
        self.masks = masks
        self.shelf = shelf
        self.pool = ThreadPoolExecutor(workers)
        self.reqs: Dict[str, Guided] = {}
        self.futures: Dict[str, Future] = {}

    def add(self, rid: str, key: str) -> Guided:
        if rid in self.reqs:
            return self.reqs[rid]
        g = Guided(rid, key)
        g.matcher = self.shelf.fetch(key)  # clean: g is in reqs, drop() shelves its matcher
        self.reqs[rid] = g
        return g

    def add_with_row(self, rid: str, key: str) -> Optional[Guided]:
        m = self.shelf.fetch(key)  # leak: not shelved when there's no mask row
        row = self.masks.reserve_row()  # clean: moved into the request
        if row is None:
            return None
        g = Guided(rid, key, matcher=m, row=row)
        self.reqs[rid] = g
        return g

    def add_batch(self, items: Dict[str, str]) -> int:
        n = 0
        for rid, key in items.items():
            row = self.masks.reserve_row()  # leak: continue on a bad grammar skips return_row
            if row is None:
                break
            try:
                m = self.shelf.fetch(key)  # clean: moved into the request
            except ValueError as e:
                logger.warning("%s: %s", rid, e)
                continue
            self.reqs[rid] = Guided(rid, key, matcher=m, row=row)
            n += 1
        return n

    def drop(self, rid: str) -> None:
        g = self.reqs.pop(rid, None)
        if g is None:
            return
        if g.matcher is not None:
            self.shelf.shelve(g.key, g.matcher)
            g.matcher = None
        if g.row is not None:
            self.masks.return_row(g.row)
            g.row = None

    def ensure_row(self, g: Guided) -> bool:
        if g.row is None:
            g.row = self.masks.reserve_row()  # clean: taken only once, drop() returns it
        return g.row is not None

    def validate(self, key: str, ids: List[int]) -> bool:
        m = self.shelf.fetch(key)  # clean: shelved in finally
        try:
            for i in ids:
                if not m.accept(i):
                    return False
            return True
        finally:
            self.shelf.shelve(key, m)

    def first_reject(self, key: str, ids: List[int]) -> int:
        m = self.shelf.fetch(key)  # leak: not shelved when a token is rejected
        for pos, i in enumerate(ids):
            if not m.accept(i):
                return pos
        self.shelf.shelve(key, m)
        return len(ids)

    def peek(self, key: str) -> bool:
        m = self.shelf.fetch_cached(key)  # clean: shelved at once when there is one
        if m is None:
            return False
        self.shelf.shelve(key, m)
        return True

    def fill_async(self, g: Guided) -> Future:
        row = self.masks.reserve_row()  # clean: near miss, the done callback returns the row
        if row is None:
            raise RuntimeError("no mask rows")
        fut = self.pool.submit(g.matcher.fill, self.masks.data[row])
        fut.add_done_callback(lambda f: self.masks.return_row(row))
        self.futures[g.rid] = fut
        return fut

    def fill_sync(self, g: Guided, logits: np.ndarray) -> None:
        row = self.masks.reserve_row()  # clean: returned in finally
        if row is None:
            return
        try:
            g.matcher.fill(self.masks.data[row])
            logits[(self.masks.data[row] == 0)[: logits.shape[0]]] = -np.inf
        finally:
            self.masks.return_row(row)

    def jump_forward(self, g: Guided, text: str) -> str:
        twin = self.shelf.fetch_cached(g.key)  # clean: near miss, replaced only when None and shelved either way
        if twin is None:
            twin = self.shelf.fetch(g.key)  # clean: shelved below
        twin.load(text)
        forced = twin.forced()
        self.shelf.shelve(g.key, twin)
        return forced

    def close(self) -> None:
        self.pool.shutdown(wait=True)
        for rid in list(self.reqs):
            self.drop(rid)
