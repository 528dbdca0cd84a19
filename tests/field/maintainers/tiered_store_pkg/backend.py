"""Backend with retries over a session pool."""
from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional

from .sessions import SessionPool, StoreSession


class StoreBackend:
    def __init__(self, pool: SessionPool, retries: int = 3):
        self.pool = pool
        self.retries = retries

    @contextlib.contextmanager
    def session(self, shared: Optional[StoreSession] = None) -> Iterator[Optional[StoreSession]]:
        """Use shared if it is given, otherwise a session of our own."""
        mine = shared is None
        s = self.pool.checkout() if mine else shared  # clean: near miss, checked in if it is our own and not None
        try:
            yield s
        finally:
            if mine and s is not None:
                self.pool.checkin(s)

    def get(self, key: str, shared: Optional[StoreSession] = None) -> Optional[bytes]:
        with self.session(shared) as s:  # clean: near miss, all returns are inside the with block
            if s is None:
                return None
            return s.read(key)

    def put(self, key: str, value: bytes) -> bool:
        s = None
        for _ in range(self.retries):
            s = self.pool.checkout()  # leak: after a failed write the next try rebinds s without checkin
            if s is None:
                continue
            if s.write(key, value):
                break
        if s is None:
            return False
        self.pool.checkin(s)
        return True

    def delete(self, keys: List[str]) -> int:
        s = self.pool.checkout_working()  # leak: the return for an empty list of keys keeps the session
        if s is None:
            return 0
        if not keys:
            return 0
        n = 0
        for k in keys:
            if s.blobs.pop(k, None) is not None:
                n += 1
        self.pool.checkin(s)
        return n

    def get_many(self, keys: List[str]) -> List[Optional[bytes]]:
        s = self.pool.checkout_working()  # clean: near miss, get is given a shared session and leaves it to us
        if s is None:
            return [None] * len(keys)
        values = [self.get(k, s) for k in keys]
        self.pool.checkin(s)
        return values
