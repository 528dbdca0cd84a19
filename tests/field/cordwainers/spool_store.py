"""Spill of cold KV pages and embeddings to disk: quota, segment files, handles kept open."""
from __future__ import annotations

import logging
import os
import struct
from collections import OrderedDict
from typing import BinaryIO, Iterator

log = logging.getLogger("spool")
HEADER = struct.Struct("<QI")


class Quota:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def charge(self, n: int) -> bool:
        if self.used + n > self.limit:
            return False
        self.used += n
        return True

    def credit(self, n: int) -> None:
        self.used -= n


class HandleCache:
    """At most `cap` files open for reading."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()

    def get(self, path: str) -> BinaryIO:
        f = self._open.get(path)
        if f is None:
            f = self._open[path] = open(path, "rb")  # clean: near miss, eviction, forget and close end it
            if len(self._open) > self.cap:
                _, old = self._open.popitem(last=False)
                old.close()
        else:
            self._open.move_to_end(path)
        return f

    def forget(self, path: str) -> None:
        f = self._open.pop(path, None)
        if f is not None:
            f.close()

    def close(self) -> None:
        for path in list(self._open):
            self.forget(path)


class Spool:
    def __init__(self, root: str, quota: Quota, handles: HandleCache) -> None:
        self.root = root
        self.quota = quota
        self.handles = handles
        self.sizes: dict[int, int] = {}

    def path(self, key: int) -> str:
        return os.path.join(self.root, f"{key:016x}.seg")

    def put(self, key: int, blob: bytes) -> bool:
        if key in self.sizes:
            return True
        if not self.quota.charge(len(blob)):  # clean: near miss, recorded in sizes, remove credits it
            return False
        with open(self.path(key), "wb") as f:  # clean: context manager
            f.write(HEADER.pack(key, len(blob)) + blob)
        self.sizes[key] = len(blob)
        return True

    def put_new(self, key: int, blob: bytes) -> bool:
        if not self.quota.charge(len(blob)):  # leak: a key that is there already keeps the second charge
            return False
        if key in self.sizes:
            return True
        with open(self.path(key), "wb") as f:  # clean: context manager
            f.write(HEADER.pack(key, len(blob)) + blob)
        self.sizes[key] = len(blob)
        return True

    def remove(self, key: int) -> bool:
        n = self.sizes.pop(key, None)
        if n is None:
            return False
        self.handles.forget(self.path(key))
        os.unlink(self.path(key))
        self.quota.credit(n)
        return True

    def read(self, key: int) -> bytes | None:
        if key not in self.sizes:
            return None
        f = self.handles.get(self.path(key))  # clean: near miss, the cache owns the file
        f.seek(HEADER.size)
        return f.read(self.sizes[key])

    def verify(self, key: int) -> bool:
        f = open(self.path(key), "rb")  # leak: a wrong key in the header returns without close
        stored, n = HEADER.unpack(f.read(HEADER.size))
        if stored != key:
            log.error("segment %x holds %x", key, stored)
            return False
        ok = len(f.read(n)) == n
        f.close()
        return ok

    def records(self, keys: list[int]) -> Iterator[bytes]:
        f: BinaryIO | None = None
        for key in keys:
            f = open(self.path(key), "rb")  # leak: each file is replaced by the next, only the last is closed
            f.seek(HEADER.size)
            yield f.read()
        if f is not None:
            f.close()

    def reserve_batch(self, sizes: list[int]) -> int:
        """Room for a batch of blobs that is about to arrive: all or nothing, returns the total."""
        total = 0
        for n in sizes:
            if not self.quota.charge(n):  # leak: the charges before the refused one are not credited
                return 0
            total += n
        return total
