import asyncio
import logging
from typing import Awaitable, Callable, Dict, List, Optional

from .staging import ChunkHeap, SendWindow

log = logging.getLogger(__name__)

Send = Callable[[str, int], Awaitable[bool]]


class Handoff:
    def __init__(self, rid: str, peer: str):
        self.rid = rid
        self.peer = peer
        self.chunks: List[int] = []
        self.task: Optional[asyncio.Task] = None


class PrefillSide:
    def __init__(self, heap: ChunkHeap, window: SendWindow, send: Send):
        self.heap = heap
        self.window = window
        self.send = send
        self.handoffs: Dict[str, Handoff] = {}

    async def push(self, h: Handoff, nbytes: int) -> bool:
        if self.handoffs.get(h.rid, h) is not h:
            return False
        need = -(-nbytes // self.heap.chunk_bytes)
        chunks = self.heap.checkout_many(need)  # clean: owned by the handoff until acked() or abort()
        if chunks is None:
            return False
        h.chunks.extend(chunks)
        self.handoffs[h.rid] = h
        for c in chunks:
            await self.window.enter()  # clean: left in finally for every chunk
            try:
                if not await self.send(h.peer, c):
                    self.abort(h.rid)
                    return False
            finally:
                self.window.leave()
        return True

    async def push_one(self, peer: str) -> bool:
        chunk = self.heap.checkout()  # clean: given back in the outer finally, or None
        if chunk is None:
            return False
        try:
            await self.window.enter()  # leak: a refused send returns before leave
            if not await self.send(peer, chunk):
                return False
            self.window.leave()
            return True
        finally:
            self.heap.giveback(chunk)

    async def push_retrying(self, peer: str, tries: int) -> bool:
        for attempt in range(tries):
            chunk = self.heap.checkout()  # leak: a refused send goes to the next try with another chunk
            if chunk is None:
                await asyncio.sleep(0.01)
                continue
            if await self.send(peer, chunk):
                self.heap.giveback(chunk)
                return True
            log.info("try %d to %s refused", attempt, peer)
        return False

    def acked(self, rid: str) -> None:
        h = self.handoffs.pop(rid, None)
        if h is not None:
            self.heap.giveback(*h.chunks)
            h.chunks.clear()

    def abort(self, rid: str) -> None:
        self.acked(rid)
