"""Pinned host memory for the workers of an image loader."""
import functools


class PinnedHeap:
    def __init__(self, count, shape):
        self._free = [bytearray(shape[0] * shape[1]) for _ in range(count)]

    def obtain(self):
        return self._free.pop()

    def relinquish(self, page):
        self._free.append(page)


def with_page(fn):
    @functools.wraps(fn)
    def inner(self, *args):
        page = self.heap.obtain()  # clean: relinquished in finally
        try:
            return fn(self, page, *args)
        finally:
            self.heap.relinquish(page)
    return inner


def with_page_if_any(fn):
    @functools.wraps(fn)
    def inner(self, *args):
        page = self.heap.obtain()  # leak: a None result of the function skips relinquish
        result = fn(self, page, *args)
        if result is None:
            self.skipped += 1
            return None
        self.heap.relinquish(page)
        return result
    return inner


def counted(fn):
    @functools.wraps(fn)
    def inner(self, *args):
        self.calls += 1
        return fn(self, *args)  # clean: what the function hands out goes to the caller
    return inner


class ImageLoader:
    def __init__(self, heap, decoder):
        self.heap = heap
        self.decoder = decoder
        self.calls = 0
        self.skipped = 0

    @with_page
    def mean(self, page, path):
        used = self.decoder.into(path, page)
        return sum(page[:used]) / max(used, 1)

    @with_page_if_any
    def thumbnail(self, page, path):
        used = self.decoder.into(path, page)
        if used == 0:
            return None
        return bytes(page[:used:16])

    @counted
    def decoded(self, path):
        page = self.heap.obtain()  # clean: handed to the caller in a pair
        return page, self.decoder.into(path, page)

    def batch(self, paths):
        rows = []
        for path in paths:
            page, used = self.decoded(path)  # clean: relinquished each round
            if used:
                rows.append(bytes(page[:used]))
            self.heap.relinquish(page)
        return rows

    def size_of(self, path):
        _, used = self.decoded(path)  # leak: only the size is unpacked
        return used

    def stats(self, paths):
        sizes = [self.size_of(path) for path in paths]
        return {"calls": self.calls, "skipped": self.skipped, "largest": max(sizes, default=0)}
