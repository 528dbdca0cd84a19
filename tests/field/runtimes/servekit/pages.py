"""Page pool and the per-request page list."""
import threading


class PagePool:
    def __init__(self, count):
        self._lock = threading.Lock()
        self._free = list(range(count))
        self._reserved = 0

    def available(self):
        return len(self._free) - self._reserved

    def grab(self, n=1):
        with self._lock:
            if len(self._free) - self._reserved < n:
                return None
            pages = self._free[:n]  # clean: cut off the list and returned
            del self._free[:n]
            return pages

    def grab_aligned(self, n, align):
        with self._lock:
            skipped = []
            while self._free:
                page = self._free.pop()  # leak: the skipped pages only go back when a fitting one is found
                if page % align == 0 and len(self._free) >= n - 1:
                    self._free.extend(skipped)
                    return page
                skipped.append(page)
            return None

    def recycle(self, pages):
        with self._lock:
            self._free.extend(pages)


class PageList:
    """Owns the pages of one request."""

    def __init__(self, pool):
        self._pool = pool
        self.pages = []
        self.shadow = []

    def extend(self, n):
        more = self._pool.grab(n)  # clean: joins the list that drop recycles
        if more is None:
            return False
        self.pages += more
        return True

    def mirror(self):
        self.shadow = self._pool.grab(len(self.pages)) or []  # leak: drop recycles the pages and forgets the shadow
        return bool(self.shadow)

    def replace(self, n):
        old, self.pages = self.pages, []
        fresh = self._pool.grab(n)  # clean: near miss, on failure the old pages return to the field
        if fresh is None:
            self.pages = old
            return False
        self.pages = fresh
        self._pool.recycle(old)
        return True

    def truncate(self, keep):
        tail, self.pages = self.pages[keep:], self.pages[:keep]
        self._pool.recycle(tail)

    def drop(self):
        self._pool.recycle(self.pages)
        self.pages = []
