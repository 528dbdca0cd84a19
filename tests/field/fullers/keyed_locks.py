"""Per-key locks for model downloads and conversions; a key's lock lives while somebody counts on it."""
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Awaitable, Callable, Dict, List, Optional

logger = logging.getLogger(__name__)
Fetch = Callable[[str], Awaitable[Optional[bytes]]]


@dataclass
class _Entry:
    held: bool = False
    refs: int = 0


class LockTable:
    def __init__(self) -> None:
        self._entries: Dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    async def lock(self, key: str) -> None:
        entry = self._entries.setdefault(key, _Entry())
        entry.refs += 1
        while entry.held:
            await asyncio.sleep(0)
        entry.held = True

    def try_lock(self, key: str) -> bool:
        entry = self._entries.get(key)
        if entry is not None and entry.held:
            return False
        entry = self._entries.setdefault(key, _Entry())
        entry.refs += 1
        entry.held = True
        return True

    def unlock(self, key: str) -> None:
        entry = self._entries[key]
        entry.held = False
        entry.refs -= 1
        if entry.refs == 0:
            del self._entries[key]


class KeyGuard:
    """`async with KeyGuard(table, key)`."""

    def __init__(self, table: LockTable, key: str) -> None:
        self.table = table
        self.key = key

    async def __aenter__(self) -> str:
        await self.table.lock(self.key)  # clean: __aexit__ unlocks on every way
        return self.key

    async def __aexit__(self, exc_type, exc, tb) -> bool:
        self.table.unlock(self.key)
        if exc_type is None:
            return False
        logger.info("%s failed: %s", self.key, exc)
        return issubclass(exc_type, FileNotFoundError)


class ModelFetcher:
    def __init__(self, table: LockTable, fetch: Fetch) -> None:
        self.table = table
        self.fetch = fetch
        self.cache: Dict[str, bytes] = {}

    async def get(self, name: str) -> Optional[bytes]:
        if name in self.cache:
            return self.cache[name]
        await self.table.lock(name)  # leak: the second look into the cache returns with the key locked
        if name in self.cache:
            return self.cache[name]
        blob = await self.fetch(name)
        if blob is not None:
            self.cache[name] = blob
        self.table.unlock(name)
        return blob

    async def get_guarded(self, name: str) -> Optional[bytes]:
        async with KeyGuard(self.table, name):  # clean: near miss, a return inside the block unlocks
            if name in self.cache:
                return self.cache[name]
            blob = await self.fetch(name)
            if blob is None:
                return None
            self.cache[name] = blob
            return blob

    async def convert_pair(self, src: str, dst: str) -> bool:
        await self.table.lock(src)  # leak: a busy target returns with the source locked
        if not self.table.try_lock(dst):  # clean: unlocked below
            logger.info("%s is being converted already", dst)
            return False
        self.cache[dst] = self.cache.get(src, b"")[::-1]
        self.table.unlock(dst)
        self.table.unlock(src)
        return True

    async def move(self, src: str, dst: str) -> None:
        held: List[str] = []
        for key in sorted({src, dst}):
            await self.table.lock(key)  # clean: near miss, every key of the list is unlocked in reverse
            held.append(key)
        if src in self.cache:
            self.cache[dst] = self.cache.pop(src)
        while held:
            self.table.unlock(held.pop())

    async def refresh_idle(self, names: List[str]) -> int:
        fresh = 0
        for name in names:
            if not self.table.try_lock(name):  # leak: a fetch that gives nothing goes on to the next with the key locked
                continue
            blob = await self.fetch(name)
            if blob is None:
                continue
            self.cache[name] = blob
            self.table.unlock(name)
            fresh += 1
        return fresh

    async def drop(self, name: str) -> Any:
        await self.table.lock(name)  # clean: unlocked by the finally
        try:
            return self.cache.pop(name, None)
        finally:
            self.table.unlock(name)


async def _main() -> None:
    async def fetch(name: str) -> Optional[bytes]:
        await asyncio.sleep(0)
        return name.encode()

    table = LockTable()
    fetcher = ModelFetcher(table, fetch)
    got = await asyncio.gather(*(fetcher.get_guarded("m") for _ in range(3)))
    assert got == [b"m"] * 3
    await fetcher.move("m", "n")
    assert await fetcher.drop("n") == b"m"
    assert await fetcher.convert_pair("x", "y")
    assert len(table) == 0


if __name__ == "__main__":
    asyncio.run(_main())
