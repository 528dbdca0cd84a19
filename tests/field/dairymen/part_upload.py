"""Multipart upload of checkpoint files to an object store.

A byte budget bounds the memory of the data in flight.  An upload id that was begun on the server has to be
completed or aborted, otherwise the parts are billed forever.
"""
import asyncio
import hashlib
import logging
import math
import os
import random
from collections import deque
from dataclasses import dataclass
from typing import AsyncIterator, Deque, List, Optional, Tuple

log = logging.getLogger("upload")

MIN_PART = 8 << 20


class UploadError(Exception):
    retryable = False


class Throttled(UploadError):
    retryable = True


class BudgetClosed(Exception):
    pass


class Permit:
    __slots__ = ("nbytes", "live")

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.live = True


class ByteBudget:
    """FIFO budget.  obtain() waits, restore() wakes the waiters in order."""

    def __init__(self, total: int):
        self.total = total
        self.left = total
        self.closed = False
        self._waiters: Deque[Tuple[int, asyncio.Future]] = deque()

    async def obtain(self, nbytes: int) -> Permit:
        nbytes = min(nbytes, self.total)
        if self.closed:
            raise BudgetClosed
        if self._waiters or self.left < nbytes:
            fut = asyncio.get_running_loop().create_future()
            self._waiters.append((nbytes, fut))
            return await fut
        self.left -= nbytes
        return Permit(nbytes)

    def obtain_now(self, nbytes: int) -> Optional[Permit]:
        if self.closed or self._waiters or self.left < nbytes:
            return None
        self.left -= nbytes
        return Permit(nbytes)

    def restore(self, permit: Permit) -> None:
        if not permit.live:
            return
        permit.live = False
        self.left += permit.nbytes
        while self._waiters and self._waiters[0][0] <= self.left:
            nbytes, fut = self._waiters.popleft()
            if fut.done():
                continue
            self.left -= nbytes
            fut.set_result(Permit(nbytes))

    def close(self) -> None:
        self.closed = True
        while self._waiters:
            _, fut = self._waiters.popleft()
            if not fut.done():
                fut.set_exception(BudgetClosed())


class Store:
    """The calls of the object store that are needed here."""

    def __init__(self, http, bucket: str):
        self.http = http
        self.bucket = bucket

    async def begin(self, key: str) -> str:
        r = await self.http.post(f"/{self.bucket}/{key}?uploads")
        return r["UploadId"]

    async def put_part(self, key: str, uid: str, number: int, body: bytes) -> str:
        r = await self.http.put(f"/{self.bucket}/{key}?partNumber={number}&uploadId={uid}", body)
        if r.status == 503:
            raise Throttled(key)
        if r.status >= 400:
            raise UploadError(f"{key} part {number}: {r.status}")
        return r.headers["ETag"]

    async def complete(self, key: str, uid: str, tags: List[str]) -> None:
        await self.http.post(f"/{self.bucket}/{key}?uploadId={uid}", {"parts": tags})

    async def abort(self, key: str, uid: str) -> None:
        await self.http.delete(f"/{self.bucket}/{key}?uploadId={uid}")


@dataclass
class Part:
    number: int
    body: bytes
    permit: Permit
    tag: str = ""


class Uploader:
    def __init__(self, store: Store, budget: ByteBudget, retries: int = 4):
        self.store = store
        self.budget = budget
        self.retries = retries
        self.sent = 0

    async def _send(self, key: str, uid: str, part: Part) -> str:
        """Takes over the permit of the part."""
        try:
            for attempt in range(self.retries):
                try:
                    part.tag = await self.store.put_part(key, uid, part.number, part.body)
                    self.sent += len(part.body)
                    return part.tag
                except Throttled:
                    await asyncio.sleep((2 ** attempt) * random.random())
            raise UploadError(f"{key} part {part.number}: retries exhausted")
        finally:
            self.budget.restore(part.permit)

    async def upload(self, path: str, key: str) -> None:
        uid = await self.store.begin(key)  # clean: near miss, completed in the else branch and aborted for any exception
        try:
            tags = []
            async for part in self._read_parts(path):
                tags.append(await self._send(key, uid, part))
        except BaseException:
            await self.store.abort(key, uid)
            raise
        else:
            await self.store.complete(key, uid, tags)

    async def _read_parts(self, path: str) -> AsyncIterator[Part]:
        size = os.path.getsize(path)
        step = max(MIN_PART, math.ceil(size / 10000))
        with open(path, "rb") as f:  # clean: closed by with
            for number in range(1, math.ceil(size / step) + 1):
                permit = await self.budget.obtain(step)  # leak: an empty read (truncated file) ends the loop with the permit
                body = f.read(step)
                if not body:
                    log.warning("%s became shorter while it was read", path)
                    break
                yield Part(number, body, permit)

    async def upload_small(self, data: bytes, key: str) -> bool:
        """One part; False if the store was throttling."""
        permit = await self.budget.obtain(len(data))  # clean: the finally restores it for each of the returns
        uid = None
        try:
            uid = await self.store.begin(key)  # leak: the Throttled handler returns False and the id is neither completed nor aborted
            tag = await self.store.put_part(key, uid, 1, data)
            await self.store.complete(key, uid, [tag])
            return True
        except Throttled:
            log.info("%s throttled", key)
            return False
        finally:
            self.budget.restore(permit)

    async def try_inline(self, data: bytes, key: str) -> Optional[str]:
        """Send without waiting when the budget has room at this moment."""
        permit = self.budget.obtain_now(len(data))  # leak: an UploadError that is not retryable returns None from the handler before restore
        if permit is None:
            return None
        digest = hashlib.md5(data).hexdigest()
        try:
            tag = await self.store.put_part(key, "inline", 0, data)
        except UploadError as exc:
            if not exc.retryable:
                log.error("%s: %s", key, exc)
                return None
            tag = digest
        self.budget.restore(permit)
        return tag


async def upload_concurrently(up: Uploader, key: str, bodies: List[bytes], width: int = 8) -> bool:
    """Parts of one file in parallel."""
    uid = await up.store.begin(key)  # clean: aborted on failure, completed else
    gate = asyncio.Semaphore(width)
    tasks = []

    async def one(number: int, body: bytes) -> str:
        async with gate:  # clean: left at the end of the block
            permit = await up.budget.obtain(len(body))  # clean: _send restores it also when it raises
            return await up._send(key, uid, Part(number, body, permit))

    for number, body in enumerate(bodies, 1):
        tasks.append(asyncio.create_task(one(number, body)))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    bad = [r for r in results if isinstance(r, BaseException)]
    if bad:
        log.error("%s: %d parts failed, first: %r", key, len(bad), bad[0])
        await up.store.abort(key, uid)
        return False
    await up.store.complete(key, uid, list(results))
    return True


async def upload_or_restart(up: Uploader, key: str, bodies: List[bytes], attempts: int = 3) -> bool:
    """For stores that do not accept a part twice: each attempt is a new upload."""
    for attempt in range(attempts):
        uid = await up.store.begin(key)  # leak: after Throttled the next attempt begins another upload and this id is forgotten
        try:
            tags = [await up.store.put_part(key, uid, n, b) for n, b in enumerate(bodies, 1)]
        except Throttled:
            await asyncio.sleep(1 << attempt)
            continue
        except UploadError:
            await up.store.abort(key, uid)
            raise
        await up.store.complete(key, uid, tags)
        return True
    return False


async def warm_budget(budget: ByteBudget, chunk: int) -> int:
    """How many chunks may be in flight, measured."""
    held = []
    while len(held) < 1024:
        permit = budget.obtain_now(chunk)  # leak: with a single permit in held the return below comes before the loop that restores
        if permit is None:
            break
        held.append(permit)
    if len(held) < 2:
        log.warning("budget of %d is too small for chunks of %d", budget.total, chunk)
        return 0
    for permit in held:
        budget.restore(permit)
    return len(held)
