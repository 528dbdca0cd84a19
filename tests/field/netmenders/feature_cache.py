"""Feature cache in front of the offline store; entries are pinned while somebody reads them."""
from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Callable, Iterable, Iterator, Optional

import torch


class Entry:
    __slots__ = ("key", "values", "pins", "born", "doomed")

    def __init__(self, key: str, values: torch.Tensor):
        self.key = key
        self.values = values
        self.pins = 0
        self.born = time.time()
        self.doomed = False


class ArrayShelf:
    """float32 rows cached by width, counted so that the soft limit can be kept."""

    def __init__(self, soft_limit: int):
        self.soft_limit = soft_limit
        self.lent = 0
        self._by_width: dict[int, list[torch.Tensor]] = collections.defaultdict(list)

    def lend(self, width: int) -> torch.Tensor:
        self.lent += 1
        if self._by_width[width]:
            return self._by_width[width].pop()
        return torch.empty(width)

    def lend_if_room(self, width: int) -> Optional[torch.Tensor]:
        if self.lent >= self.soft_limit:
            return None
        return self.lend(width)  # clean: returned to the caller

    def reshelve(self, row: torch.Tensor) -> None:
        self.lent -= 1
        self._by_width[row.numel()].append(row)


class FeatureCache:
    """pin() a key before reading; the evictor passes over pinned entries."""

    def __init__(self, shelf: ArrayShelf, capacity: int):
        self.shelf = shelf
        self.capacity = capacity
        self._entries: collections.OrderedDict[str, Entry] = collections.OrderedDict()
        self._mu = threading.RLock()

    def pin(self, key: str) -> Optional[Entry]:
        with self._mu:
            e = self._entries.get(key)
            if e is None or e.doomed:
                return None
            e.pins += 1
            self._entries.move_to_end(key)
            return e

    def unpin(self, e: Entry) -> None:
        with self._mu:
            e.pins -= 1
            if e.doomed and e.pins == 0:
                self._entries.pop(e.key, None)
                self.shelf.reshelve(e.values)

    @contextlib.contextmanager
    def reading(self, key: str) -> Iterator[Optional[Entry]]:
        e = self.pin(key)  # clean: unpinned in finally where it is not None
        try:
            yield e
        finally:
            if e is not None:
                self.unpin(e)

    def fill(self, key: str, width: int, load: Callable[[str, torch.Tensor], bool]) -> bool:
        row = self.shelf.lend(width)  # clean: reshelved when the load fails, else the entry has it, which evict() reshelves
        if not load(key, row):
            self.shelf.reshelve(row)
            return False
        with self._mu:
            old = self._entries.pop(key, None)
            self._entries[key] = Entry(key, row)
        if old is not None and old.pins == 0:
            self.shelf.reshelve(old.values)
        elif old is not None:
            old.doomed = True
            self._adopt_doomed(old)
        return True

    def _adopt_doomed(self, e: Entry) -> None:
        e.key = f"{e.key}@{id(e)}"
        self._entries[e.key] = e

    def fill_absent(self, key: str, width: int, load: Callable[[str, torch.Tensor], bool]) -> bool:
        row = self.shelf.lend(width)  # leak: lost when another thread filled the key meanwhile
        if not load(key, row):
            self.shelf.reshelve(row)
            return False
        with self._mu:
            if key in self._entries:
                return True
            self._entries[key] = Entry(key, row)
        return True

    def evict(self) -> int:
        gone = 0
        with self._mu:
            for key in list(self._entries):
                if len(self._entries) <= self.capacity:
                    break
                e = self._entries[key]
                if e.pins:
                    continue
                del self._entries[key]
                self.shelf.reshelve(e.values)
                gone += 1
        return gone

    def expire(self, max_age: float) -> None:
        now = time.time()
        with self._mu:
            for key, e in list(self._entries.items()):
                if now - e.born < max_age:
                    continue
                if e.pins:
                    e.doomed = True
                else:
                    del self._entries[key]
                    self.shelf.reshelve(e.values)


class FeatureReader:
    def __init__(self, cache: FeatureCache, width: int, load: Callable[[str, torch.Tensor], bool]):
        self.cache = cache
        self.width = width
        self.load = load
        self.sticky: dict[str, Entry] = {}

    def read(self, key: str) -> Optional[torch.Tensor]:
        with self.cache.reading(key) as e:  # clean: with statement
            return None if e is None else e.values.clone()

    def read_fresh(self, key: str, max_age: float) -> Optional[torch.Tensor]:
        e = self.cache.pin(key)  # leak: a stale entry stays pinned
        if e is None:
            return None
        if time.time() - e.born > max_age:
            return None
        out = e.values.clone()
        self.cache.unpin(e)
        return out

    def read_through(self, key: str) -> Optional[torch.Tensor]:
        e = self.cache.pin(key)  # clean: near miss, only rebound where it is None
        if e is None:
            if not self.cache.fill(key, self.width, self.load):
                return None
            e = self.cache.pin(key)  # clean: unpinned below, None is checked
        if e is None:
            return None
        try:
            return e.values.clone()
        finally:
            self.cache.unpin(e)

    def read_many(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        got: dict[str, torch.Tensor] = {}
        for key in keys:
            e = self.cache.pin(key)  # leak: a key asked for twice is passed over while pinned
            if e is None:
                continue
            if key in got:
                continue
            got[key] = e.values.clone()
            self.cache.unpin(e)
        return got

    def latest_of(self, keys: list[str]) -> Optional[torch.Tensor]:
        best: Optional[Entry] = None
        for key in keys:
            e = self.cache.pin(key)  # leak: the former best is rebound without an unpin
            if e is None:
                continue
            if best is None or e.born > best.born:
                best = e
            else:
                self.cache.unpin(e)
        if best is None:
            return None
        out = best.values.clone()
        self.cache.unpin(best)
        return out

    def oldest_of(self, keys: list[str]) -> Optional[torch.Tensor]:
        pick: Optional[Entry] = None
        for key in keys:
            e = self.cache.pin(key)  # clean: near miss, either the loser or the one it displaces is unpinned
            if e is None:
                continue
            if pick is not None and e.born >= pick.born:
                self.cache.unpin(e)
                continue
            if pick is not None:
                self.cache.unpin(pick)
            pick = e
        if pick is None:
            return None
        out = pick.values.clone()
        self.cache.unpin(pick)
        return out

    def stick(self, key: str) -> bool:
        if key in self.sticky:
            return True
        e = self.cache.pin(key)  # clean: near miss, sits in sticky, which unstick_all() empties
        if e is None:
            return False
        self.sticky[key] = e
        return True

    def unstick_all(self) -> None:
        while self.sticky:
            _, e = self.sticky.popitem()
            self.cache.unpin(e)

    def joined(self, left: str, right: str) -> Optional[torch.Tensor]:
        a = self.cache.pin(left)  # leak: stays pinned when the right entry is missing
        if a is None:
            return None
        b = self.cache.pin(right)  # clean: unpinned with a after the join
        if b is None:
            return None
        out = torch.cat([a.values, b.values])
        self.cache.unpin(b)
        self.cache.unpin(a)
        return out

    def score(self, key: str, weight: torch.Tensor) -> float:
        row = self.cache.shelf.lend_if_room(self.width)  # clean: reshelved unless it is None
        if row is None:
            return float("nan")
        ok = self.load(key, row)
        value = float(row @ weight) if ok else float("nan")
        self.cache.shelf.reshelve(row)
        return value

    def blend(self, keys: list[str]) -> torch.Tensor:
        acc = self.cache.shelf.lend(self.width)  # clean: the result is a clone and acc is reshelved
        acc.zero_()
        for key in keys:
            with self.cache.reading(key) as e:  # clean: with statement, continue included
                if e is None:
                    continue
                acc.add_(e.values)
        out = acc.clone()
        self.cache.shelf.reshelve(acc)
        return out
