"""Chunks of registered memory and the window of unacknowledged sends."""
import asyncio
import heapq
from typing import List, Optional


class ChunkHeap:
    def __init__(self, count: int, chunk_bytes: int):
        self.chunk_bytes = chunk_bytes
        self._heap: List[int] = list(range(count))

    def checkout(self) -> Optional[int]:
        return heapq.heappop(self._heap) if self._heap else None  # clean: handed to the caller

    def checkout_many(self, n: int) -> Optional[List[int]]:
        chunks: List[int] = []
        for _ in range(n):
            c = self.checkout()  # clean: on a shortage the chunks so far are returned
            if c is None:
                self.giveback(*chunks)
                return None
            chunks.append(c)
        return chunks

    def giveback(self, *chunks: int) -> None:
        for c in chunks:
            heapq.heappush(self._heap, c)


class SendWindow:
    def __init__(self, width: int):
        self._sem = asyncio.Semaphore(width)
        self.closed = False

    async def enter(self) -> None:
        await self._sem.acquire()  # leak: the closed window raises with the permit taken
        if self.closed:
            raise ConnectionResetError("window closed")

    def leave(self) -> None:
        self._sem.release()
