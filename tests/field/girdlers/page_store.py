"""Page cache of an embedded key-value store: pinned frames, leaf format and a small B+ tree over it."""
from __future__ import annotations

import bisect
import struct
import threading
from typing import Dict, Iterator, List, Optional, Tuple

PAGE_SIZE = 4096
HEADER = struct.Struct("<HHI")          # kind, count, next
LEAF, INNER, FREE = 1, 2, 3


class Frame:
    __slots__ = ("page_no", "data", "pins", "dirty")

    def __init__(self, page_no: int, data: bytearray) -> None:
        self.page_no = page_no
        self.data = data
        self.pins = 0
        self.dirty = False

    def header(self) -> Tuple[int, int, int]:
        return HEADER.unpack_from(self.data, 0)

    def set_header(self, kind: int, count: int, following: int) -> None:
        HEADER.pack_into(self.data, 0, kind, count, following)
        self.dirty = True


class PageCache:
    """Frames stay in memory while pinned. pin() and fresh() pin once, unpin() undoes one pin."""

    def __init__(self, path: str, capacity: int) -> None:
        self.file = open(path, "r+b")  # clean: closed by shutdown
        self.capacity = capacity
        self.frames: Dict[int, Frame] = {}
        self.next_page = 1
        self.lock = threading.RLock()

    def pin(self, page_no: int) -> Frame:
        with self.lock:
            frame = self.frames.get(page_no)
            if frame is None:
                self._make_room()
                self.file.seek(page_no * PAGE_SIZE)
                raw = bytearray(self.file.read(PAGE_SIZE).ljust(PAGE_SIZE, b"\0"))
                frame = self.frames[page_no] = Frame(page_no, raw)
            frame.pins += 1
            return frame

    def pin_cached(self, page_no: int) -> Optional[Frame]:
        """Pins only what is in memory already."""
        with self.lock:
            frame = self.frames.get(page_no)
            if frame is not None:
                frame.pins += 1
            return frame

    def fresh(self, kind: int) -> Frame:
        with self.lock:
            page_no, self.next_page = self.next_page, self.next_page + 1
            self._make_room()
            frame = Frame(page_no, bytearray(PAGE_SIZE))
            frame.set_header(kind, 0, 0)
            frame.pins = 1
            self.frames[page_no] = frame
            return frame

    def unpin(self, frame: Frame, dirty: bool = False) -> None:
        with self.lock:
            frame.dirty = frame.dirty or dirty
            frame.pins -= 1

    def _make_room(self) -> None:
        if len(self.frames) < self.capacity:
            return
        for page_no, frame in list(self.frames.items()):
            if frame.pins == 0:
                self._write(frame)
                del self.frames[page_no]
                return
        raise MemoryError("all frames are pinned")

    def _write(self, frame: Frame) -> None:
        if frame.dirty:
            self.file.seek(frame.page_no * PAGE_SIZE)
            self.file.write(frame.data)
            frame.dirty = False

    def checkpoint(self) -> int:
        written = 0
        for page_no in sorted(self.frames):
            frame = self.pin_cached(page_no)  # leak: clean pages are skipped with their pin kept
            if frame is None or not frame.dirty:
                continue
            self._write(frame)
            self.unpin(frame)
            written += 1
        self.file.flush()
        return written

    def shutdown(self) -> None:
        for frame in self.frames.values():
            self._write(frame)
        self.frames.clear()
        self.file.close()


def leaf_entries(frame: Frame) -> List[Tuple[bytes, int]]:
    _, count, _ = frame.header()
    out = []
    offset = HEADER.size
    for _ in range(count):
        size, value = struct.unpack_from("<HI", frame.data, offset)
        offset += 6
        out.append((bytes(frame.data[offset:offset + size]), value))
        offset += size
    return out


def store_entries(frame: Frame, entries: List[Tuple[bytes, int]]) -> bool:
    need = HEADER.size + sum(6 + len(key) for key, _ in entries)
    if need > PAGE_SIZE:
        return False
    kind, _, following = frame.header()
    offset = HEADER.size
    for key, value in entries:
        struct.pack_into("<HI", frame.data, offset, len(key), value)
        offset += 6
        frame.data[offset:offset + len(key)] = key
        offset += len(key)
    frame.set_header(kind, len(entries), following)
    return True


class Tree:
    def __init__(self, cache: PageCache, root: int) -> None:
        self.cache = cache
        self.root = root

    def _descend(self, key: bytes) -> Frame:
        """The pinned leaf in which key belongs; the inner pages on the way are unpinned."""
        frame = self.cache.pin(self.root)  # clean: crabbing, unpinned for its child or handed to the caller
        while frame.header()[0] == INNER:
            entries = leaf_entries(frame)
            keys = [k for k, _ in entries]
            child = entries[max(0, bisect.bisect_right(keys, key) - 1)][1]
            below = self.cache.pin(child)  # clean: near miss, becomes frame in the next round
            self.cache.unpin(frame)
            frame = below
        return frame

    def get(self, key: bytes) -> Optional[int]:
        leaf = self._descend(key)  # leak: the return for a found key leaves the leaf pinned
        for candidate, value in leaf_entries(leaf):
            if candidate == key:
                return value
        self.cache.unpin(leaf)
        return None

    def depth(self) -> int:
        levels = 1
        frame = self.cache.pin(self.root)  # leak: the rebinding to the child loses the pin of the parent
        while frame.header()[0] == INNER:
            child = leaf_entries(frame)[0][1]
            frame = self.cache.pin(child)  # leak: overwritten by the next level when the tree is deeper
            levels += 1
        self.cache.unpin(frame)
        return levels

    def put(self, key: bytes, value: int) -> int:
        leaf = self._descend(key)  # clean: unpinned on the short way and after the split
        entries = [e for e in leaf_entries(leaf) if e[0] != key]
        bisect.insort(entries, (key, value))
        if store_entries(leaf, entries):
            self.cache.unpin(leaf, dirty=True)
            return leaf.page_no
        right = self.cache.fresh(LEAF)  # clean: unpinned dirty below
        half = len(entries) // 2
        store_entries(right, entries[half:])
        store_entries(leaf, entries[:half])
        _, count, following = leaf.header()
        right.set_header(LEAF, len(entries) - half, following)
        leaf.set_header(LEAF, count, right.page_no)
        page_no = right.page_no
        self.cache.unpin(right, dirty=True)
        self.cache.unpin(leaf, dirty=True)
        return page_no

    def merge_right(self, page_no: int) -> bool:
        left = self.cache.pin(page_no)  # clean: unpinned on all three ways
        following = left.header()[2]
        if following == 0:
            self.cache.unpin(left)
            return False
        right = self.cache.pin(following)  # leak: when the pages do not fit together only left is unpinned
        merged = leaf_entries(left) + leaf_entries(right)
        if not store_entries(left, merged):
            self.cache.unpin(left)
            return False
        left.set_header(LEAF, len(merged), right.header()[2])
        right.set_header(FREE, 0, 0)
        self.cache.unpin(right, dirty=True)
        self.cache.unpin(left, dirty=True)
        return True

    def scan(self, start: bytes) -> Iterator[Tuple[bytes, int]]:
        leaf: Optional[Frame] = self._descend(start)  # clean: unpinned when the scan moves on
        while leaf is not None:
            rows = [row for row in leaf_entries(leaf) if row[0] >= start]
            following = leaf.header()[2]
            self.cache.unpin(leaf)
            yield from rows
            leaf = self.cache.pin(following) if following else None  # clean: unpinned in the next round


class Cursor:
    """A position in the leaf chain; move() carries the pin along, close() gives the last one up."""

    def __init__(self, tree: Tree, start: bytes) -> None:
        self.cache = tree.cache
        self.leaf: Optional[Frame] = tree._descend(start)  # clean: move and close unpin
        self.index = 0

    def move(self) -> bool:
        if self.leaf is None:
            return False
        self.index += 1
        if self.index < self.leaf.header()[1]:
            return True
        following = self.leaf.header()[2]
        self.cache.unpin(self.leaf)
        self.leaf = None
        if not following:
            return False
        self.leaf = self.cache.pin(following)  # clean: kept in the cursor until move or close
        self.index = 0
        return True

    def close(self) -> None:
        if self.leaf is not None:
            self.cache.unpin(self.leaf)
            self.leaf = None


class Snapshot:
    """Keeps a set of pages in memory for the time of a backup."""

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        self.kept: Dict[int, Frame] = {}

    def keep(self, page_no: int) -> bytes:
        if page_no not in self.kept:
            self.kept[page_no] = self.cache.pin(page_no)  # leak: release() empties the table only
        return bytes(self.kept[page_no].data)

    def release(self) -> int:
        count = len(self.kept)
        self.kept.clear()
        return count


def dump(tree: Tree, path: str, limit: int) -> int:
    out = open(path, "wb")  # leak: the return at the limit leaves the file open
    written = 0
    for key, value in tree.scan(b""):
        if written >= limit:
            return written
        out.write(key + b"\t" + str(value).encode() + b"\n")
        written += 1
    out.close()
    return written
