"""Writes shards to a primary store and, if there is one, to a replica."""
from __future__ import annotations

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, Iterable, List, Optional, Protocol

from .chunks import ChunkArena, ChunkLease

log = logging.getLogger(__name__)


class Store(Protocol):
    def put(self, key: str, data: memoryview) -> bool: ...

    def get_into(self, key: str, data: memoryview) -> int: ...


class Saver:
    def __init__(self, arena: ChunkArena, primary: Store, replica: Optional[Store] = None) -> None:
        self.arena = arena
        self.primary = primary
        self.replica = replica
        self._exec = ThreadPoolExecutor(4)
        self._replicating: Dict[str, Future] = {}
        self._digests: Dict[str, str] = {}

    def fill(self, data: memoryview) -> ChunkLease:
        """A chunk with data in it; the caller ends it."""
        c = self.arena.grant()  # clean: returned to the caller
        c.mem[: len(data)] = data
        return c

    def save(self, key: str, data: memoryview) -> bool:
        c = self.fill(data)  # clean: near miss, ended in finally; the replica has its own reference
        try:
            if self.replica is not None:
                self._replicate(key, c.dup(), len(data))  # clean: ended by _copy()
            return self.primary.put(key, c.mem[: len(data)])
        finally:
            c.end()

    def _replicate(self, key: str, c: ChunkLease, n: int) -> None:
        self._replicating[key] = self._exec.submit(self._copy, key, c, n)

    def _copy(self, key: str, c: ChunkLease, n: int) -> bool:
        with c as mem:
            return self.replica.put(key, mem[:n])

    def save_once(self, key: str, data: memoryview) -> bool:
        c = self.fill(data)  # leak: an unchanged digest returns without end()
        digest = hashlib.blake2b(c.mem[: len(data)]).hexdigest()
        if self._digests.get(key) == digest:
            log.debug("%s is unchanged", key)
            return True
        ok = self.primary.put(key, c.mem[: len(data)])
        if ok:
            self._digests[key] = digest
        c.end()
        return ok

    def digest_of(self, data: memoryview) -> str:
        return hashlib.blake2b(self.fill(data).mem[: len(data)]).hexdigest()  # leak: the lease is a temporary never ended

    def save_group(self, items: Dict[str, memoryview]) -> List[str]:
        """All chunks are filled before the first put, for a consistent snapshot."""
        held = self.arena.grant_many(len(items))  # leak: on a failed put the chunks after it are never ended
        if held is None:
            return []
        for c, data in zip(held, items.values()):
            c.mem[: len(data)] = data
        done: List[str] = []
        for c, (key, data) in zip(held, items.items()):
            ok = self.primary.put(key, c.mem[: len(data)])
            c.end()
            if not ok:
                break
            done.append(key)
        return done

    def join(self) -> int:
        failed = 0
        for key, f in list(self._replicating.items()):
            if not f.result():
                failed += 1
            del self._replicating[key]
        return failed

    def close(self) -> None:
        self.join()
        self._exec.shutdown()


def save_stream(saver: Saver, key: str, parts: Iterable[memoryview]) -> int:
    n = 0
    for i, p in enumerate(parts):
        with saver.fill(p) as mem:  # clean: the lease is its own context manager
            if not saver.primary.put(f"{key}/{i}", mem[: len(p)]):
                return n
        n += 1
    return n
