import os
import random
import shutil

import numpy as np

from .locks import lock, locked, try_lock, unlock
from .regions import REGION, BudgetExceeded


class Cursor:
    """A position in a data set. The region below it stays pinned."""

    def __init__(self, cache, path):
        self.cache = cache
        self.path = path
        self.region = None

    def at(self, index):
        if self.region is not None and self.region.index == index:
            return self.region.data
        fresh = self.cache.pin(self.path, index)  # clean: near miss, the cursor owns it and unpins the one before
        self.close()
        self.region = fresh
        return fresh.data

    def close(self):
        region, self.region = self.region, None
        if region is not None:
            self.cache.unpin(region)


class Dataset:
    def __init__(self, cache, path, width):
        self.cache = cache
        self.path = path
        self.width = width
        self.row_bytes = width * 4
        self.rows = os.path.getsize(path) // self.row_bytes

    def row(self, i):
        index, offset = divmod(i * self.row_bytes, REGION)
        first = self.cache.pin(self.path, index)  # leak: for a row over a border the second pin raises BudgetExceeded, which rows() handles
        raw = first.data[offset:offset + self.row_bytes]
        if len(raw) < self.row_bytes:
            second = self.cache.pin(self.path, index + 1)  # clean: unpinned in the same branch
            raw += second.data[:self.row_bytes - len(raw)]
            self.cache.unpin(second)
        self.cache.unpin(first)
        return np.frombuffer(raw, dtype=np.int32)

    def rows_of(self, indices):
        """Rows that cannot be mapped now are left out; the loader asks again."""
        found = {}
        for i in indices:
            try:
                found[i] = self.row(i)
            except BudgetExceeded:
                continue
        return found

    def tokens(self, start=0):
        cursor = Cursor(self.cache, self.path)
        try:
            for i in range(start, self.rows):
                index, offset = divmod(i * self.row_bytes, REGION)
                yield cursor.at(index)[offset:offset + self.row_bytes]
        finally:
            cursor.close()

    def peek(self, index):
        """First tokens of a region, None for a region of padding."""
        region = self.cache.pin(self.path, index)  # leak: a region of padding returns None while it is pinned
        head = np.frombuffer(region.data[:64], dtype=np.int32)
        if not head.any():
            return None
        self.cache.unpin(region)
        return head

    def sample(self, count, seed):
        rng = random.Random(seed)
        picked = []
        for _ in range(count):
            region = self.cache.pin(self.path, rng.randrange(self.rows * self.row_bytes // REGION))  # clean: unpinned in the finally
            try:
                raw = region.data[:self.row_bytes]
                if len(raw) < self.row_bytes:
                    continue
                picked.append(np.frombuffer(raw, dtype=np.int32))
            finally:
                self.cache.unpin(region)
        return picked


class TokenWriter:
    """Owns the lock of the file it writes, from open to close."""

    def __init__(self, path):
        self.path = path
        self.lock = lock(path)  # leak: close() closes the file and does not unlock
        self.out = open(path + ".part", "wb")  # clean: closed in close()
        self.count = 0

    def add(self, ids):
        self.out.write(np.asarray(ids, dtype=np.int32).tobytes())
        self.count += 1

    def close(self):
        self.out.close()
        os.replace(self.path + ".part", self.path)


def build(path, rows):
    """Tokenise into path unless another rank does or did."""
    fd = try_lock(path)  # clean: None or unlocked in the finally
    if fd is None:
        return False
    try:
        if os.path.exists(path):
            return False
        with open(path + ".tmp", "wb") as out:  # clean: closed by the with statement
            for row in rows:
                out.write(np.asarray(row, dtype=np.int32).tobytes())
        os.replace(path + ".tmp", path)
        return True
    finally:
        unlock(fd)


def append(path, rows):
    writer = TokenWriter(path)  # clean: closed in the finally
    try:
        for ids in rows:
            writer.add(ids)
    finally:
        writer.close()


def merge(target, sources):
    with locked(target):  # clean: the with statement unlocks it
        with open(target, "ab") as out:  # clean: closed by the with statement
            for source in sources:
                with open(source, "rb") as f:  # clean: closed by the with statement
                    shutil.copyfileobj(f, out)
