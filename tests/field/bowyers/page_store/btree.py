"""B+tree over the buffer pool; keys are 64-bit entity ids, values are row offsets."""
from __future__ import annotations

import struct
from typing import Iterator, Optional

from .buffers import PAGE_SIZE, BufferPool, Frame, PinnedPage

HEADER = struct.Struct("<BHq")      # is_leaf, count, next
ENTRY = struct.Struct("<QQ")
FANOUT = (PAGE_SIZE - HEADER.size) // ENTRY.size


def header(frame: Frame) -> tuple[bool, int, int]:
    leaf, count, nxt = HEADER.unpack_from(frame.data, 0)
    return bool(leaf), count, nxt


def put_header(frame: Frame, leaf: bool, count: int, nxt: int) -> None:
    HEADER.pack_into(frame.data, 0, leaf, count, nxt)


def entries(frame: Frame) -> list[tuple[int, int]]:
    _, count, _ = header(frame)
    return [ENTRY.unpack_from(frame.data, HEADER.size + i * ENTRY.size) for i in range(count)]


def put_entries(frame: Frame, rows: list[tuple[int, int]]) -> None:
    for i, (key, value) in enumerate(rows):
        ENTRY.pack_into(frame.data, HEADER.size + i * ENTRY.size, key, value)


def child_for(rows: list[tuple[int, int]], key: int) -> int:
    page = rows[0][1]
    for low, number in rows:
        if low > key:
            break
        page = number
    return page


class BTree:
    def __init__(self, pool: BufferPool, root: int) -> None:
        self._pool = pool
        self.root = root
        self.splits = 0

    def descend(self, key: int) -> Frame:
        """Leaf frame that covers the key, pinned for the caller."""
        frame = self._pool.pin(self.root)  # clean: near miss, parents unpinned, leaf to the caller
        while True:
            leaf, _, _ = header(frame)
            if leaf:
                return frame
            child = child_for(entries(frame), key)
            below = self._pool.pin(child)  # clean: becomes the current frame
            self._pool.unpin(frame)
            frame = below

    def descend_path(self, key: int) -> list[Frame]:
        """All frames from the root to the leaf, pinned for the caller."""
        path = [self._pool.pin(self.root)]  # clean: handed to the caller in the path
        while not header(path[-1])[0]:
            path.append(self._pool.pin(child_for(entries(path[-1]), key)))  # clean: handed to the caller
        return path

    def get(self, key: int) -> Optional[int]:
        leaf = self.descend(key)  # leak: the return of a found value skips the unpin
        for k, value in entries(leaf):
            if k == key:
                return value
        self._pool.unpin(leaf)
        return None

    def depth(self) -> int:
        levels = 1
        frame = self._pool.pin(self.root)  # clean: unpinned on the way down or at the end
        while not header(frame)[0]:
            number = entries(frame)[0][1]
            self._pool.unpin(frame)
            frame = self._pool.pin(number)  # clean: unpinned on the way down or at the end
            levels += 1
        self._pool.unpin(frame)
        return levels

    def leftmost_key(self) -> int:
        frame = self._pool.pin(self.root)  # leak: the loop rebinds the frame without unpinning the parent
        while not header(frame)[0]:
            frame = self._pool.pin(entries(frame)[0][1])  # leak: inner frames are rebound while still pinned
        low = entries(frame)[0][0]
        self._pool.unpin(frame)
        return low

    def insert(self, key: int, value: int) -> bool:
        path = self.descend_path(key)  # leak: a duplicate key returns with the whole path pinned
        leaf = path[-1]
        rows = entries(leaf)
        if any(k == key for k, _ in rows):
            return False
        rows.append((key, value))
        rows.sort()
        if len(rows) > FANOUT:
            self._split(path, rows)
        else:
            _, _, nxt = header(leaf)
            put_entries(leaf, rows)
            put_header(leaf, True, len(rows), nxt)
        for frame in path:
            self._pool.unpin(frame, dirty=frame is leaf)
        return True

    def delete(self, key: int) -> bool:
        path = self.descend_path(key)  # clean: every frame of the path is unpinned in the finally
        try:
            leaf = path[-1]
            rows = [(k, v) for k, v in entries(leaf) if k != key]
            _, count, nxt = header(leaf)
            if len(rows) == count:
                return False
            put_entries(leaf, rows)
            put_header(leaf, True, len(rows), nxt)
            leaf.dirty = True
            return True
        finally:
            while path:
                self._pool.unpin(path.pop())

    def _split(self, path: list[Frame], rows: list[tuple[int, int]]) -> None:
        leaf = path[-1]
        right = self._pool.append_page()  # leak: no unpin when the leaf is the root
        half = len(rows) // 2
        _, _, nxt = header(leaf)
        put_entries(right, rows[half:])
        put_header(right, True, len(rows) - half, nxt)
        put_entries(leaf, rows[:half])
        put_header(leaf, True, half, right.page_no)
        self.splits += 1
        if len(path) == 1:
            self._grow_root(leaf.page_no, rows[0][0], right.page_no, rows[half][0])
            return
        parent = path[-2]
        up = sorted(entries(parent) + [(rows[half][0], right.page_no)])
        put_entries(parent, up)
        put_header(parent, False, len(up), -1)
        self._pool.unpin(right, dirty=True)

    def _grow_root(self, left: int, left_key: int, right: int, right_key: int) -> None:
        top = self._pool.append_page()  # clean: unpinned at the end
        put_entries(top, [(left_key, left), (right_key, right)])
        put_header(top, False, 2, -1)
        self.root = top.page_no
        self._pool.unpin(top, dirty=True)

    def scan(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        frame = self.descend(low)  # clean: near miss, unpinned before each step and at the end
        while True:
            rows = entries(frame)
            _, _, nxt = header(frame)
            self._pool.unpin(frame)
            for key, value in rows:
                if key > high:
                    return
                if key >= low:
                    yield key, value
            if nxt < 0:
                return
            frame = self._pool.pin(nxt)  # clean: unpinned at the top of the next turn

    def scan_leaves(self, low: int) -> Iterator[int]:
        """Fill grade of each leaf from the given key on."""
        frame = self.descend(low)  # leak: the last leaf (or an empty one) ends the generator still pinned
        while True:
            _, count, nxt = header(frame)
            if count == 0 or nxt < 0:
                return
            yield count * 100 // FANOUT
            self._pool.unpin(frame)
            frame = self._pool.pin(nxt)  # leak: the last leaf ends the generator still pinned

    def cached_share(self, pages: list[int]) -> float:
        hits = sum(1 for n in pages if self._pool.pin_if_cached(n))  # leak: pinned frames are only counted
        return hits / max(len(pages), 1)

    def set_next(self, page_no: int, nxt: int) -> None:
        with PinnedPage(self._pool, page_no, write=True) as frame:  # clean: scoped pin
            leaf, count, _ = header(frame)
            put_header(frame, leaf, count, nxt)
