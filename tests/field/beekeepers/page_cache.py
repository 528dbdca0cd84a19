"""Buffer cache of the storage engine, with a B+tree and a heap scan above it."""
from __future__ import annotations

import bisect
import struct
from contextlib import contextmanager
from typing import Iterator, Optional

PAGE = 4096


class Frame:
    __slots__ = ("page_no", "data", "pins", "dirty", "kind", "keys", "children", "next_leaf")

    def __init__(self, page_no: int, data: bytearray) -> None:
        self.page_no = page_no
        self.data = data
        self.pins = 0
        self.dirty = False
        self.kind, count = struct.unpack_from("<HH", data, 0)
        self.keys = list(struct.unpack_from("<%dQ" % count, data, 16))
        self.children = list(struct.unpack_from("<%dQ" % (count + 1), data, 16 + 8 * count))
        self.next_leaf = struct.unpack_from("<q", data, 8)[0]

    @property
    def is_leaf(self) -> bool:
        return self.kind == 2


class BufferCache:
    """fix() pins a page in memory; unfix() lets the clock evict it again."""

    def __init__(self, store, capacity: int) -> None:
        self.store = store
        self.capacity = capacity
        self._frames: dict[int, Frame] = {}

    def fix(self, page_no: int) -> Frame:
        frame = self._frames.get(page_no)
        if frame is None:
            if len(self._frames) >= self.capacity:
                self._evict()
            frame = Frame(page_no, bytearray(self.store.read(page_no)))
            self._frames[page_no] = frame
        frame.pins += 1
        return frame

    def fix_if_cached(self, page_no: int) -> Optional[Frame]:
        frame = self._frames.get(page_no)
        if frame is not None:
            frame.pins += 1
        return frame

    def unfix(self, frame: Frame, dirty: bool = False) -> None:
        assert frame.pins > 0
        frame.pins -= 1
        frame.dirty = frame.dirty or dirty

    def _evict(self) -> None:
        for page_no, frame in list(self._frames.items()):
            if frame.pins == 0:
                if frame.dirty:
                    self.store.write(page_no, bytes(frame.data))
                del self._frames[page_no]
                return
        raise MemoryError("all pages pinned")

    @contextmanager
    def fixed(self, page_no: int):
        frame = self.fix(page_no)  # clean: unfixed in the finally
        try:
            yield frame
        finally:
            self.unfix(frame)


class BTree:
    def __init__(self, cache: BufferCache, root: int) -> None:
        self.cache = cache
        self.root = root

    def _descend(self, key: int) -> Frame:
        """Crab down to the leaf of key; the leaf comes back fixed."""
        frame = self.cache.fix(self.root)  # clean: near miss, unfixed after the child is fixed, or returned
        while not frame.is_leaf:
            slot = bisect.bisect_right(frame.keys, key)
            child = self.cache.fix(frame.children[slot])  # clean: becomes frame, the leaf is returned
            self.cache.unfix(frame)
            frame = child
        return frame

    def lookup(self, key: int) -> Optional[int]:
        leaf = self._descend(key)  # leak: the not-found return keeps the leaf fixed
        slot = bisect.bisect_left(leaf.keys, key)
        if slot == len(leaf.keys) or leaf.keys[slot] != key:
            return None
        value = leaf.children[slot]
        self.cache.unfix(leaf)
        return value

    def contains(self, key: int) -> bool:
        leaf = self._descend(key)  # clean: unfixed on the only way out
        slot = bisect.bisect_left(leaf.keys, key)
        found = slot < len(leaf.keys) and leaf.keys[slot] == key
        self.cache.unfix(leaf)
        return found

    def depth(self) -> int:
        levels = 1
        frame = self.cache.fix(self.root)  # leak: rebound to the child, the root stays fixed
        while not frame.is_leaf:
            frame = self.cache.fix(frame.children[0])  # leak: rebound at each inner level
            levels += 1
        self.cache.unfix(frame)
        return levels

    def first_key(self) -> int:
        with self.cache.fixed(self.root) as top:  # clean: context manager
            if top.is_leaf:
                return top.keys[0]
            page_no = top.children[0]
        while True:
            with self.cache.fixed(page_no) as frame:  # clean: near miss, return inside the with
                if frame.is_leaf:
                    return frame.keys[0]
                page_no = frame.children[0]

    def range(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        leaf = self._descend(low)  # clean: near miss, each leaf unfixed in the finally or when stepping
        try:
            while True:
                for key, value in zip(leaf.keys, leaf.children):
                    if key > high:
                        return
                    if key >= low:
                        yield key, value
                if leaf.next_leaf < 0:
                    return
                following = self.cache.fix(leaf.next_leaf)  # clean: becomes leaf, the finally unfixes it
                self.cache.unfix(leaf)
                leaf = following
        finally:
            self.cache.unfix(leaf)

    def count_from(self, low: int) -> int:
        leaf = self._descend(low)  # clean: unfixed before stepping on
        total = len(leaf.keys) - bisect.bisect_left(leaf.keys, low)
        while leaf.next_leaf >= 0:
            sibling = leaf.next_leaf
            self.cache.unfix(leaf)
            leaf = self.cache.fix(sibling)  # leak: returned with the last sibling fixed
            if leaf.next_leaf < 0:
                return total + len(leaf.keys)
            total += len(leaf.keys)
        self.cache.unfix(leaf)
        return total

    def split_leaf(self, parent_no: int, leaf_no: int, spare_no: int) -> bool:
        parent = self.cache.fix(parent_no)  # clean: unfixed on both ways
        leaf = self.cache.fix(leaf_no)  # leak: the parent-full way back unfixes only the parent
        if len(parent.keys) >= 200:
            self.cache.unfix(parent)
            return False
        spare = self.cache.fix(spare_no)  # clean: unfixed dirty below
        half = len(leaf.keys) // 2
        spare.keys, leaf.keys = leaf.keys[half:], leaf.keys[:half]
        spare.next_leaf, leaf.next_leaf = leaf.next_leaf, spare_no
        bisect.insort(parent.keys, spare.keys[0])
        for frame in (spare, leaf, parent):
            self.cache.unfix(frame, dirty=True)
        return True


class HeapScan:
    """Sequential scan with the current page fixed between calls of next_row()."""

    def __init__(self, cache: BufferCache, pages: list[int]) -> None:
        self.cache = cache
        self.pages = pages
        self.at = -1
        self.slot = 0
        self.current: Optional[Frame] = None

    def next_row(self) -> Optional[int]:
        while True:
            if self.current is not None:
                if self.slot < len(self.current.keys):
                    self.slot += 1
                    return self.current.keys[self.slot - 1]
                self.cache.unfix(self.current)
                self.current = None
            self.at += 1
            if self.at >= len(self.pages):
                return None
            self.current = self.cache.fix(self.pages[self.at])  # clean: near miss, next_row or close unfixes
            self.slot = 0

    def seek(self, index: int) -> None:
        self.close()
        self.at = index
        self.slot = 0
        self.current = self.cache.fix(self.pages[index])  # clean: close() ran first, held by the scan

    def close(self) -> None:
        if self.current is not None:
            self.cache.unfix(self.current)
            self.current = None


def warm(cache: BufferCache, page_numbers: list[int]) -> int:
    loaded = 0
    for page_no in page_numbers:
        frame = cache.fix_if_cached(page_no)  # clean: near miss, unfixed when not None
        if frame is not None:
            cache.unfix(frame)
            continue
        cache.unfix(cache.fix(page_no))  # clean: fixed and unfixed in one line
        loaded += 1
    return loaded


def stamp(cache: BufferCache, page_no: int, lsn: int) -> bool:
    frame = cache.fix_if_cached(page_no)  # leak: a clean page returns with the pin held
    if frame is None:
        return False
    if not frame.dirty:
        return False
    struct.pack_into("<Q", frame.data, PAGE - 8, lsn)
    cache.unfix(frame, dirty=True)
    return True
