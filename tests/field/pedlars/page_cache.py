"""Page cache with pins and latches, and the B-tree descent that runs over it."""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Dict, Iterator, List, NamedTuple, Optional

INNER = 1
LEAF = 2


class Frame:
    __slots__ = ("page_no", "pins", "dirty", "kind", "keys", "children", "right", "latch")

    def __init__(self, page_no: int) -> None:
        self.page_no = page_no
        self.pins = 0
        self.dirty = False
        self.kind = LEAF
        self.keys: List[int] = []
        self.children: List[int] = []
        self.right: Optional[int] = None
        self.latch = threading.Lock()


class PageCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._frames: Dict[int, Frame] = {}
        self._mutex = threading.Lock()
        self.misses = 0

    def pin(self, page_no: int) -> Frame:
        with self._mutex:
            frame = self._frames.get(page_no)
            if frame is None:
                self.misses += 1
                self._evict_one()
                frame = self._frames[page_no] = Frame(page_no)
            frame.pins += 1
            return frame

    def try_pin(self, page_no: int) -> Optional[Frame]:
        """Pins only what is resident."""
        with self._mutex:
            frame = self._frames.get(page_no)
            if frame is None:
                return None
            frame.pins += 1
            return frame

    def unpin(self, frame: Frame, dirty: bool = False) -> None:
        with self._mutex:
            frame.pins -= 1
            frame.dirty = frame.dirty or dirty

    def _evict_one(self) -> None:
        if len(self._frames) < self.capacity:
            return
        for no, frame in self._frames.items():
            if frame.pins == 0 and not frame.dirty:
                del self._frames[no]
                return

    @contextmanager
    def pinned(self, page_no: int) -> Iterator[Frame]:
        frame = self.pin(page_no)  # clean: unpinned in the finally of the manager
        try:
            yield frame
        finally:
            self.unpin(frame)


class PathEntry(NamedTuple):
    frame: Frame
    slot: int


class BTree:
    def __init__(self, cache: PageCache, root: int) -> None:
        self.cache = cache
        self.root = root

    def _slot(self, frame: Frame, key: int) -> int:
        slot = 0
        while slot < len(frame.keys) and frame.keys[slot] <= key:
            slot += 1
        return slot

    def descend(self, key: int) -> Frame:
        """Lands on a pinned leaf; the pin is the caller's."""
        frame = self.cache.pin(self.root)  # clean: near miss, coupled down or returned
        while frame.kind == INNER:
            child = self.cache.pin(frame.children[self._slot(frame, key)])  # clean: becomes frame
            self.cache.unpin(frame)
            frame = child
        return frame

    def depth(self, key: int) -> int:
        levels = 1
        frame = self.cache.pin(self.root)  # leak: overwritten by the child on the first step
        while frame.kind == INNER:
            frame = self.cache.pin(frame.children[self._slot(frame, key)])  # leak: lost on the next step
            levels += 1
        self.cache.unpin(frame)
        return levels

    def contains(self, key: int) -> bool:
        leaf = self.descend(key)  # clean: unpinned after the test
        found = key in leaf.keys
        self.cache.unpin(leaf)
        return found

    def leaf_number(self, key: int) -> int:
        return self.descend(key).page_no  # leak: only the number is kept of the pinned leaf

    def count_from(self, key: int, stop: int) -> int:
        leaf = self.descend(key)  # clean: near miss, moved right with the old one unpinned first
        n = 0
        while True:
            n += sum(1 for k in leaf.keys if key <= k < stop)
            nxt = leaf.right
            self.cache.unpin(leaf)
            if nxt is None:
                break
            leaf = self.cache.pin(nxt)  # clean: unpinned on top of the next round
        return n

    def last_below(self, key: int) -> Optional[int]:
        leaf = self.descend(key)  # leak: break out of the loop leaves the leaf pinned
        best: Optional[int] = None
        for k in leaf.keys:
            if k >= key:
                break
            best = k
        else:
            self.cache.unpin(leaf)
        return best

    def path_to(self, key: int) -> List[PathEntry]:
        path: List[PathEntry] = []
        frame = self.cache.pin(self.root)  # clean: kept in the path, which is the caller's
        while frame.kind == INNER:
            slot = self._slot(frame, key)
            path.append(PathEntry(frame, slot))
            frame = self.cache.pin(frame.children[slot])  # clean: appended to the path
        path.append(PathEntry(frame, self._slot(frame, key)))
        return path

    def drop_path(self, path: List[PathEntry], dirty: bool = False) -> None:
        while path:
            entry = path.pop()
            self.cache.unpin(entry.frame, dirty)

    def insert(self, key: int) -> bool:
        path = self.path_to(key)  # clean: near miss, drop_path() on both ways
        leaf = path[-1].frame
        if key in leaf.keys:
            self.drop_path(path)
            return False
        leaf.keys.insert(path[-1].slot, key)
        self._split_if_full(path)
        self.drop_path(path, dirty=True)
        return True

    def remove(self, key: int) -> bool:
        path = self.path_to(key)  # leak: only the last of the path is unpinned
        leaf = path.pop().frame
        hit = key in leaf.keys
        if hit:
            leaf.keys.remove(key)
        self.cache.unpin(leaf, dirty=hit)
        return hit

    def _split_if_full(self, path: List[PathEntry]) -> None:
        leaf = path[-1].frame
        if len(leaf.keys) < 256:
            return
        right_no = max(e.frame.page_no for e in path) + 1
        right = self.cache.pin(right_no)  # clean: unpinned after the split
        right.keys = leaf.keys[128:]
        right.right, leaf.right = leaf.right, right_no
        del leaf.keys[128:]
        self.cache.unpin(right, dirty=True)

    def swap_keys(self, a: int, b: int) -> None:
        """Latches in page order; both are held over the exchange."""
        if a == b:
            return
        with self.cache.pinned(min(a, b)) as lo, self.cache.pinned(max(a, b)) as hi:  # clean: with
            lo.latch.acquire()  # clean: released below
            hi.latch.acquire()  # clean: released below
            lo.keys, hi.keys = hi.keys, lo.keys
            hi.latch.release()
            lo.latch.release()

    def try_compact(self, page_no: int) -> bool:
        with self.cache.pinned(page_no) as frame:  # clean: with
            if not frame.latch.acquire(blocking=False):  # leak: latch is kept on the return for clean pages
                return False
            if not frame.dirty:
                return False
            frame.keys = sorted(set(frame.keys))
            frame.latch.release()
            return True


class Prefetcher:
    """Keeps the hot pages pinned until the scan that asked for them is over."""

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        self.held: Dict[int, Frame] = {}

    def want(self, numbers: List[int]) -> int:
        got = 0
        for no in numbers:
            if no in self.held:
                continue
            frame = self.cache.try_pin(no)  # clean: near miss, held until done() or done_all()
            if frame is None:
                continue
            self.held[no] = frame
            got += 1
        return got

    def done(self, no: int) -> None:
        frame = self.held.pop(no, None)
        if frame is not None:
            self.cache.unpin(frame)

    def done_all(self) -> None:
        for frame in self.held.values():
            self.cache.unpin(frame)
        self.held.clear()

    def warm(self, numbers: List[int]) -> int:
        cold = 0
        for no in numbers:
            if self.cache.try_pin(no) is None:  # leak: a resident page gets a pin nobody drops
                cold += 1
        return cold
