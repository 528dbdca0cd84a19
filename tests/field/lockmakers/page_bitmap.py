"""Bitmap pages for the embedding spill file.

Pages are numbered; a page is a fixed range of the memory-mapped file.  The
module keeps a default PageMap, and most of the code goes through the module
functions page_get / page_put.
"""
import contextlib
import mmap
import os
import struct

import torch

PAGE = 1 << 16


class SpillFull(Exception):
    pass


class PageMap:
    def __init__(self, npages):
        self.npages = npages
        self.bits = bytearray((npages + 7) // 8)
        self.hint = 0
        self.live = 0

    def _test(self, p):
        return self.bits[p >> 3] >> (p & 7) & 1

    def mark(self, p):
        self.bits[p >> 3] |= 1 << (p & 7)
        self.live += 1

    def unmark(self, p):
        self.bits[p >> 3] &= ~(1 << (p & 7)) & 0xFF
        self.live -= 1
        self.hint = min(self.hint, p)

    def page_get(self):
        for p in range(self.hint, self.npages):
            if not self._test(p):
                self.mark(p)  # clean: returned to the caller
                self.hint = p + 1
                return p
        return None

    def extent_get(self, n):
        """n pages, not always adjacent; raises when they are not there."""
        out = []
        for _ in range(n):
            p = self.page_get()  # leak: SpillFull is raised with the first pages of the extent marked
            if p is None:
                raise SpillFull(n)
            out.append(p)
        return out

    def extent_get_all_or_none(self, n):
        out = []
        while len(out) < n:
            p = self.page_get()  # clean: near miss, the short extent is unmarked before None is returned
            if p is None:
                for q in out:
                    self.unmark(q)
                return None
            out.append(p)
        return out


_map = PageMap(4096)


def page_get():
    return _map.page_get()  # clean: returned to the caller


def page_put(p):
    _map.unmark(p)


def page_must():
    p = page_get()  # clean: None raises and any page is returned
    if p is None:
        raise SpillFull(1)
    return p


@contextlib.contextmanager
def page_kept(keep):
    """The page stays with `keep` when the body succeeds."""
    p = page_must()  # clean: near miss, put on an error, and on success appended to the caller's list
    try:
        yield p
    except BaseException:
        page_put(p)
        raise
    keep.append(p)


class SpillFile:
    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self.fd, _map.npages * PAGE)
        self.mm = mmap.mmap(self.fd, _map.npages * PAGE)
        self.rows = {}
        self.journal = []

    def _write(self, p, blob):
        self.mm[p * PAGE:p * PAGE + len(blob)] = blob

    def _read(self, p, n):
        return self.mm[p * PAGE:p * PAGE + n]

    def spill(self, key, vec):
        blob = vec.contiguous().numpy().tobytes()
        if len(blob) > PAGE:
            return False
        p = page_get()  # clean: near miss, goes into self.rows, and the page of an older row is put
        if p is None:
            return False
        self._write(p, blob)
        old = self.rows.get(key)
        self.rows[key] = (p, len(blob))
        if old is not None:
            page_put(old[0])
        return True

    def drop(self, key):
        entry = self.rows.pop(key, None)
        if entry is not None:
            page_put(entry[0])

    def drop_all(self):
        for key in list(self.rows):
            self.drop(key)
        while self.journal:
            page_put(self.journal.pop())

    def load(self, key, dtype=torch.float32):
        p, n = self.rows[key]
        return torch.frombuffer(bytearray(self._read(p, n)), dtype=dtype)

    def log(self, text):
        data = text.encode()
        p = page_must()  # leak: a text that does not fit is refused with the page marked
        if len(data) + 4 > PAGE:
            return False
        self._write(p, struct.pack("<I", len(data)) + data)
        self.journal.append(p)
        return True

    def log_binary(self, data):
        with page_kept(self.journal) as p:  # clean: near miss, the context manager gives the page to the journal
            self._write(p, data[:PAGE])

    def spill_once(self, key, vec):
        p = page_get()  # leak: setdefault keeps the older entry and the new page has no holder
        if p is None:
            return False
        blob = vec.numpy().tobytes()[:PAGE]
        self._write(p, blob)
        self.rows.setdefault(key, (p, len(blob)))
        return True

    def relocate(self, key):
        p, n = self.rows[key]
        bounce = page_get()  # leak: without a second page False is returned and the bounce page is not put
        if bounce is None:
            return False
        dst = page_get()  # clean: moved into self.rows in place of the page that is put
        if dst is None:
            return False
        self._write(bounce, self._read(p, n))
        self._write(dst, self._read(bounce, n))
        self.rows[key] = (dst, n)
        page_put(p)
        page_put(bounce)
        return True

    def replicate(self, key, n):
        if key not in self.rows:
            return []
        pages = _map.extent_get(n)  # leak: only the first page is returned as replica and the rest are dropped
        p, size = self.rows[key]
        for q in pages:
            self._write(q, self._read(p, size))
        return pages[:1]
