"""Downloads weight shards under connection permits (asyncio.Semaphore inside)."""
from __future__ import annotations

import asyncio
from typing import Dict, List, Optional, Tuple


class FetchError(Exception):
    pass


class Origin:
    def __init__(self, blobs: Dict[str, bytes]) -> None:
        self.blobs = blobs

    async def read(self, name: str) -> bytes:
        await asyncio.sleep(0)
        if name not in self.blobs:
            raise FetchError(name)
        return self.blobs[name]


class Permits:
    """Two limits per host: sockets and bytes in memory."""

    def __init__(self, sockets: int, megabytes: int) -> None:
        self._sockets = asyncio.Semaphore(sockets)
        self.megabytes = megabytes

    async def enter(self) -> None:
        await self._sockets.acquire()  # clean: handed to the caller, leave releases

    def leave(self) -> None:
        self._sockets.release()

    def charge(self, mb: int) -> bool:
        if mb > self.megabytes:
            return False
        self.megabytes -= mb
        return True

    def refund(self, mb: int) -> None:
        self.megabytes += mb


class Socket:
    """One socket for the length of an async with block."""

    def __init__(self, permits: Permits, strict: bool) -> None:
        self.permits = permits
        self.strict = strict

    async def __aenter__(self) -> "Socket":
        await self.permits.enter()  # leak: __aexit__ returns True for a tolerated FetchError without leave
        return self

    async def __aexit__(self, et, ev, tb) -> bool:
        if et is FetchError and not self.strict:
            return True
        self.permits.leave()
        return False


class Fetcher:
    def __init__(self, origin: Origin, permits: Permits) -> None:
        self.origin = origin
        self.permits = permits
        self.resident: Dict[str, Tuple[bytes, int]] = {}

    async def fetch(self, name: str) -> bytes:
        await self.permits.enter()  # clean: left in finally
        try:
            return await self.origin.read(name)
        finally:
            self.permits.leave()

    async def fetch_mirrored(self, name: str, mirrors: List[Origin]) -> Optional[bytes]:
        for mirror in mirrors:
            await self.permits.enter()  # leak: FetchError goes on to the next mirror without leave
            try:
                blob = await mirror.read(name)
            except FetchError:
                continue
            self.permits.leave()
            return blob
        return None

    async def fetch_first(self, name: str, mirrors: List[Origin]) -> Optional[bytes]:
        await self.permits.enter()  # clean: near miss, one permit for all mirrors, left on either return
        for mirror in mirrors:
            try:
                blob = await mirror.read(name)
            except FetchError:
                continue
            self.permits.leave()
            return blob
        self.permits.leave()
        return None

    async def try_fetch(self, name: str) -> Optional[bytes]:
        async with Socket(self.permits, strict=False):  # clean: the scope holds it, what is lost is lost by its __aexit__
            return await self.origin.read(name)
        return None

    async def load(self, name: str, mb: int) -> bool:
        if name in self.resident or not self.permits.charge(mb):  # clean: near miss, kept with the blob in resident, unload refunds it
            return False
        try:
            blob = await self.fetch(name)
        except FetchError:
            self.permits.refund(mb)
            return False
        self.unload(name)
        self.resident[name] = (blob, mb)
        return True

    async def verify(self, name: str, mb: int, size: int) -> bool:
        if not self.permits.charge(mb):  # leak: wrong size returns False with the charge standing
            return False
        blob = await self.fetch(name)
        if len(blob) != size:
            return False
        self.permits.refund(mb)
        return True

    def unload(self, name: str) -> None:
        entry = self.resident.pop(name, None)
        if entry is not None:
            self.permits.refund(entry[1])

    async def background(self, name: str) -> "asyncio.Task[bytes]":
        await self.permits.enter()  # clean: the task's done callback leaves
        task = asyncio.ensure_future(self.origin.read(name))
        task.add_done_callback(lambda _t: self.permits.leave())
        return task


async def main() -> None:
    origin, empty = Origin({"a": b"abc"}), Origin({})
    permits = Permits(2, 10)
    f = Fetcher(origin, permits)
    print(await f.fetch("a"), await f.fetch_first("a", [empty, origin]), await f.load("a", 4), await f.load("zz", 4))
    print(await (await f.background("a")), await f.verify("a", 1, 3))
    f.unload("a")
    print(permits.megabytes)


if __name__ == "__main__":
    asyncio.run(main())
