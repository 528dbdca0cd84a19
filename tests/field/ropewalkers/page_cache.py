"""Page cache of the embedded key value store: fixed frames, latched pages, a small tree on top."""
from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field


@dataclass(eq=False)
class Page:
    number: int
    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    right: int = -1
    fixes: int = 0
    dirty: bool = False

    @property
    def leaf(self) -> bool:
        return not self.children

    @property
    def full(self) -> bool:
        return len(self.keys) >= 64


class PageCache:
    """A page which is fixed stays in its frame until each fix is undone by unfix."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self._resident: dict[int, Page] = {}
        self._disk: dict[int, Page] = {}
        self._next = 0
        self._mu = threading.Lock()

    def fix(self, number: int) -> Page:
        with self._mu:
            page = self._resident.get(number)
            if page is None:
                self._evict_one()
                page = self._resident[number] = self._disk[number]
            page.fixes += 1
            return page

    def fix_new(self) -> Page:
        with self._mu:
            self._evict_one()
            page = Page(self._next)
            self._next += 1
            self._resident[page.number] = self._disk[page.number] = page
            page.fixes += 1
            return page

    def unfix(self, page: Page, dirty: bool = False) -> None:
        with self._mu:
            page.fixes -= 1
            page.dirty = page.dirty or dirty

    def _evict_one(self) -> None:
        if len(self._resident) < self.frames:
            return
        for number, page in list(self._resident.items()):
            if page.fixes == 0:
                del self._resident[number]
                return

    def read_ahead(self, first: int, n: int) -> list[int]:
        """Brings pages in before a scan."""
        loaded = []
        for number in range(first, first + n):
            if number not in self._disk:
                break
            page = self.fix(number)  # leak: pages brought in stay fixed for good
            loaded.append(page.number)
        return loaded


class Tree:
    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        root = cache.fix_new()  # clean: unfixed once its number is known
        self.root = root.number
        cache.unfix(root, dirty=True)

    def descend(self, key: bytes) -> Page:
        """The leaf for the key, fixed. Pages above it are released on the way down."""
        page = self.cache.fix(self.root)  # clean: handed on as leaf, or unfixed below its child
        while not page.leaf:
            at = bisect.bisect_right(page.keys, key)
            child = self.cache.fix(page.children[at])  # clean: near miss, becomes the page of the next round
            self.cache.unfix(page)
            page = child
        return page

    def get(self, key: bytes) -> bytes | None:
        leaf = self.descend(key)  # clean: unfixed before both returns
        at = bisect.bisect_left(leaf.keys, key)
        if at < len(leaf.keys) and leaf.keys[at] == key:
            value = leaf.values[at]
            self.cache.unfix(leaf)
            return value
        self.cache.unfix(leaf)
        return None

    def contains(self, key: bytes) -> bool:
        leaf = self.descend(key)  # leak: a tombstone returns with the leaf fixed
        at = bisect.bisect_left(leaf.keys, key)
        found = at < len(leaf.keys) and leaf.keys[at] == key
        if found and leaf.values[at] == b"\x00":
            return False
        self.cache.unfix(leaf)
        return found

    def put(self, key: bytes, value: bytes) -> None:
        leaf = self.descend(key)  # clean: unfixed after the insert or by the split
        if leaf.full:
            leaf = self.split(leaf, key)  # clean: near miss, the half that fits stays fixed and is unfixed
        at = bisect.bisect_left(leaf.keys, key)
        if at < len(leaf.keys) and leaf.keys[at] == key:
            leaf.values[at] = value
        else:
            leaf.keys.insert(at, key)
            leaf.values.insert(at, value)
        self.cache.unfix(leaf, dirty=True)

    def split(self, leaf: Page, key: bytes) -> Page:
        """Takes over the fixed leaf; returns the half for the key, fixed, and unfixes the other."""
        new = self.cache.fix_new()  # clean: returned or unfixed
        half = len(leaf.keys) // 2
        new.keys, leaf.keys = leaf.keys[half:], leaf.keys[:half]
        new.values, leaf.values = leaf.values[half:], leaf.values[:half]
        new.right, leaf.right = leaf.right, new.number
        if key >= new.keys[0]:
            self.cache.unfix(leaf, dirty=True)
            return new
        self.cache.unfix(new, dirty=True)
        return leaf

    def last_key(self) -> bytes | None:
        page = self.cache.fix(self.root)  # leak: replaced by the right neighbour and not unfixed
        while page.right >= 0:
            page = self.cache.fix(page.right)  # leak: replaced while there is a further neighbour
        key = page.keys[-1] if page.keys else None
        self.cache.unfix(page)
        return key

    def scan(self, low: bytes, high: bytes):
        leaf = self.descend(low)  # clean: near miss, whichever leaf is current is unfixed in the finally
        try:
            while True:
                for key, value in zip(leaf.keys, leaf.values):
                    if key >= high:
                        return
                    if key >= low:
                        yield key, value
                if leaf.right < 0:
                    return
                following = self.cache.fix(leaf.right)  # clean: takes the place of the unfixed leaf
                self.cache.unfix(leaf)
                leaf = following
        finally:
            self.cache.unfix(leaf)

    def merge_right(self, key: bytes) -> bool:
        """Joins the leaf with its right neighbour when both are nearly empty."""
        leaf = self.descend(key)  # clean: unfixed on all ways
        if leaf.right < 0:
            self.cache.unfix(leaf)
            return False
        right = self.cache.fix(leaf.right)  # leak: too large a pair unfixes only the left one
        if len(leaf.keys) + len(right.keys) > 48:
            self.cache.unfix(leaf)
            return False
        leaf.keys += right.keys
        leaf.values += right.values
        leaf.right = right.right
        self.cache.unfix(right, dirty=True)
        self.cache.unfix(leaf, dirty=True)
        return True


class TreeCursor:
    """Position in a tree for the network protocol: opened, moved, closed by separate messages."""

    def __init__(self, tree: Tree, key: bytes) -> None:
        self.tree = tree
        self.leaf: Page | None = tree.descend(key)  # clean: unfixed by advance or close
        self.at = bisect.bisect_left(self.leaf.keys, key)

    def advance(self) -> bool:
        if self.leaf is None:
            return False
        self.at += 1
        if self.at < len(self.leaf.keys):
            return True
        done, number = self.leaf, self.leaf.right
        self.leaf = self.tree.cache.fix(number) if number >= 0 else None  # clean: close unfixes it
        self.tree.cache.unfix(done)
        self.at = 0
        return self.leaf is not None

    def close(self) -> None:
        if self.leaf is not None:
            self.tree.cache.unfix(self.leaf)
            self.leaf = None


def count_from(tree: Tree, key: bytes, limit: int) -> int:
    cursor = TreeCursor(tree, key)  # leak: reaching the limit returns with the cursor open
    n = 0
    while cursor.advance():
        n += 1
        if n >= limit:
            return limit
    cursor.close()
    return n
