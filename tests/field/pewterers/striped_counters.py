"""Striped feature counters with explicit locks; entries are reference-counted."""
from __future__ import annotations

import threading
from typing import Callable, Dict, Iterable, List, Optional


class Entry:
    __slots__ = ("key", "value", "users", "evicted")

    def __init__(self, key: str) -> None:
        self.key = key
        self.value = 0
        self.users = 0
        self.evicted = False


class Stripe:
    __slots__ = ("lock", "entries")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: Dict[str, Entry] = {}


class StripedCounters:
    def __init__(self, stripes: int = 8) -> None:
        self._stripes = [Stripe() for _ in range(stripes)]
        self._maintenance = threading.Lock()
        self.dirty: List[str] = []

    def _stripe(self, key: str) -> Stripe:
        return self._stripes[hash(key) % len(self._stripes)]

    def ref(self, key: str) -> Entry:
        stripe = self._stripe(key)
        with stripe.lock:
            entry = stripe.entries.get(key)
            if entry is None:
                entry = stripe.entries[key] = Entry(key)
            entry.users += 1
            return entry

    def ref_existing(self, key: str) -> Optional[Entry]:
        stripe = self._stripe(key)
        with stripe.lock:
            entry = stripe.entries.get(key)
            if entry is None:
                return None
            entry.users += 1
            return entry

    def unref(self, entry: Entry) -> None:
        stripe = self._stripe(entry.key)
        with stripe.lock:
            entry.users -= 1
            if entry.users == 0 and entry.evicted:
                stripe.entries.pop(entry.key, None)

    def increment(self, key: str, by: int) -> int:
        entry = self.ref(key)  # leak: a zero step returns without unref
        if by == 0:
            return entry.value
        entry.value += by
        self.dirty.append(key)
        self.unref(entry)
        return entry.value

    def total(self, keys: Iterable[str]) -> int:
        acc = 0
        for key in keys:
            entry = self.ref_existing(key)  # leak: continue for evicted entries keeps the use count up
            if entry is None:
                continue
            if entry.evicted:
                continue
            acc += entry.value
            self.unref(entry)
        return acc

    def total_live(self, keys: Iterable[str]) -> int:
        acc = 0
        for key in keys:
            entry = self.ref_existing(key)  # clean: near miss, unref in finally before the continue takes effect
            if entry is None:
                continue
            try:
                if entry.evicted:
                    continue
                acc += entry.value
            finally:
                self.unref(entry)
        return acc

    def update(self, key: str, fn: Callable[[int], int]) -> bool:
        stripe = self._stripe(key)
        stripe.lock.acquire()  # leak: ValueError from fn is caught and returns with the stripe locked
        entry = stripe.entries.get(key)
        if entry is None:
            stripe.lock.release()
            return False
        try:
            entry.value = fn(entry.value)
        except ValueError:
            return False
        stripe.lock.release()
        return True

    def evict(self, key: str) -> bool:
        stripe = self._stripe(key)
        if not stripe.lock.acquire(timeout=0.01):  # clean: near miss, released on both ways after it was had
            return False
        entry = stripe.entries.get(key)
        if entry is None:
            stripe.lock.release()
            return False
        entry.evicted = True
        if entry.users == 0:
            del stripe.entries[key]
        stripe.lock.release()
        return True

    def move(self, src: str, dst: str) -> bool:
        """Adds src's value onto dst and zeroes src."""
        a, b = self._stripe(src), self._stripe(dst)
        if a is b:
            with a.lock:
                return self._transfer(a, a, src, dst)
        first, second = sorted((a, b), key=id)
        first.lock.acquire()  # leak: returns False still locked when the second lock is busy
        if not second.lock.acquire(timeout=0.01):  # clean: released in finally
            return False
        try:
            return self._transfer(a, b, src, dst)
        finally:
            second.lock.release()
            first.lock.release()

    def _transfer(self, a: Stripe, b: Stripe, src: str, dst: str) -> bool:
        if src not in a.entries or dst not in b.entries:
            return False
        b.entries[dst].value += a.entries[src].value
        a.entries[src].value = 0
        return True

    def freeze(self) -> None:
        for stripe in self._stripes:
            stripe.lock.acquire()  # clean: near miss, thaw() releases all of them

    def thaw(self) -> None:
        for stripe in reversed(self._stripes):
            stripe.lock.release()

    def dump(self) -> Dict[str, int]:
        self.freeze()  # clean: thaw in finally
        try:
            return {k: e.value for s in self._stripes for k, e in s.entries.items()}
        finally:
            self.thaw()

    def count(self, limit: int) -> Optional[int]:
        self.freeze()  # leak: over the limit returns None while frozen
        n = sum(len(s.entries) for s in self._stripes)
        if n > limit:
            return None
        self.thaw()
        return n

    def maintain(self, wait: bool) -> int:
        locked = self._maintenance.acquire(blocking=wait)  # clean: near miss, released under the returned flag
        removed = 0
        if locked:
            for stripe in self._stripes:
                with stripe.lock:
                    dead = [k for k, e in stripe.entries.items() if e.evicted and not e.users]
                    for key in dead:
                        del stripe.entries[key]
                    removed += len(dead)
        if locked:
            self._maintenance.release()
        return removed
