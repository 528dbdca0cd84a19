from __future__ import annotations

import asyncio
from typing import Awaitable, Callable

from .staging import ChunkHeap

Recv = Callable[[int], Awaitable[int]]


class DecodeSide:
    """Posts receive chunks ahead of time; a chunk leaves `posted` when it was read."""

    def __init__(self, heap: ChunkHeap, recv: Recv) -> None:
        self.heap = heap
        self.recv = recv
        self.posted: dict[int, asyncio.Task] = {}

    def post(self, n: int) -> int:
        made = 0
        while made < n:
            chunk = self.heap.checkout()  # clean: near miss, a key of self.posted until its task is awaited
            if chunk is None:
                break
            self.posted[chunk] = asyncio.ensure_future(self.recv(chunk))
            made += 1
        return made

    async def take_next(self) -> int:
        chunk = next(iter(self.posted))
        task = self.posted.pop(chunk)
        try:
            return await task
        finally:
            self.heap.giveback(chunk)

    async def shutdown(self) -> None:
        for chunk, task in list(self.posted.items()):
            task.cancel()
            self.heap.giveback(chunk)
        self.posted.clear()

    async def pull(self, expected: int) -> bytes | None:
        chunk = self.heap.checkout()  # leak: a length that differs returns None without giveback
        if chunk is None:
            return None
        got = await self.recv(chunk)
        if got != expected:
            return None
        data = self.read(chunk, got)
        self.heap.giveback(chunk)
        return data

    async def pull_pair(self) -> tuple[int, int] | None:
        a = self.heap.checkout()  # leak: without a second chunk the first one is not given back
        if a is None:
            return None
        b = self.heap.checkout()  # clean: given back in finally, or None
        if b is None:
            return None
        try:
            first, second = await asyncio.gather(self.recv(a), self.recv(b))
            return first, second
        finally:
            self.heap.giveback(a, b)

    def read(self, chunk: int, n: int) -> bytes:
        return memoryview(bytearray(self.heap.chunk_bytes))[:n].tobytes()
