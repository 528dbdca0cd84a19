"""Reads shards back, with a read-ahead table."""
from __future__ import annotations

from collections import OrderedDict
from typing import Callable, Iterator, List, Optional, Tuple

from .chunks import ChunkArena, ChunkLease
from .saver import Store


class Loader:
    def __init__(self, arena: ChunkArena, store: Store, ahead: int = 4) -> None:
        self.arena = arena
        self.store = store
        self.ahead = ahead
        self._table: "OrderedDict[str, Tuple[ChunkLease, int]]" = OrderedDict()

    def _read(self, key: str, wait: bool) -> Optional[Tuple[ChunkLease, int]]:
        c = self.arena.grant(wait=wait)  # clean: ended when the key is absent, else handed to the caller
        if c is None:
            return None
        n = self.store.get_into(key, c.mem)
        if n < 0:
            c.end()
            return None
        return c, n

    def read_ahead(self, keys: List[str]) -> None:
        for key in keys[: self.ahead]:
            if key in self._table:
                continue
            got = self._read(key, wait=False)  # clean: put in the table, which take() and close() empty
            if got is None:
                break
            self._table[key] = got

    def refresh(self, key: str) -> bool:
        got = self._read(key, wait=True)  # clean: near miss, the entry it replaces is popped and ended
        if got is None:
            return False
        old = self._table.pop(key, None)
        if old is not None:
            old[0].end()
        self._table[key] = got
        return True

    def take(self, key: str) -> Optional[Tuple[ChunkLease, int]]:
        """The caller ends the lease."""
        if key in self._table:
            return self._table.pop(key)
        return self._read(key, wait=True)  # clean: handed to the caller

    def load(self, key: str, sink: Callable[[memoryview], None]) -> bool:
        got = self.take(key)  # leak: an empty shard returns False without end()
        if got is None:
            return False
        c, n = got
        if n == 0:
            return False
        sink(c.mem[:n])
        c.end()
        return True

    def stream(self, keys: List[str]) -> Iterator[bytes]:
        for i, key in enumerate(keys):
            self.read_ahead(keys[i + 1 :])
            got = self.take(key)  # leak: a consumer that stops at a yield leaves the lease, end() is not in a finally
            if got is None:
                continue
            c, n = got
            yield bytes(c.mem[:n])
            c.end()

    def close(self) -> None:
        while self._table:
            _, (c, _n) = self._table.popitem()
            c.end()
