"""Replication of a Raft leader: in-flight windows per follower and snapshot sessions (asyncio)."""
import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional

log = logging.getLogger("raft")

Send = Callable[[int, bytes], Awaitable[bool]]


class Window:
    """Number of appends a follower may have outstanding."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._wake = asyncio.Event()

    async def admit(self) -> None:
        while self._left == 0:
            self._wake.clear()
            await self._wake.wait()
        self._left -= 1

    def admit_nowait(self) -> bool:
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def dismiss(self) -> None:
        self._left += 1
        self._wake.set()


class SnapshotStore:
    """A snapshot can't be deleted as long as it is open somewhere."""

    def __init__(self) -> None:
        self._chunks: Dict[int, List[bytes]] = {}
        self._open: Dict[int, int] = {}

    def save(self, index: int, chunks: List[bytes]) -> None:
        self._chunks[index] = chunks

    def open_latest(self) -> Optional[int]:
        if not self._chunks:
            return None
        index = max(self._chunks)
        self._open[index] = self._open.get(index, 0) + 1
        return index

    def close(self, index: int) -> None:
        self._open[index] -= 1

    def chunks(self, index: int) -> List[bytes]:
        return self._chunks[index]

    def prune(self) -> int:
        old = [i for i in sorted(self._chunks)[:-1] if not self._open.get(i)]
        for i in old:
            del self._chunks[i]
        return len(old)


class Follower:
    def __init__(self, node: int, window: Window) -> None:
        self.node = node
        self.window = window
        self.match = 0
        self.snapshot: Optional[int] = None


class Leader:
    def __init__(self, followers: List[Follower], store: SnapshotStore, send: Send) -> None:
        self.followers = {f.node: f for f in followers}
        self.store = store
        self.send = send
        self.term = 1
        self.stepped_down = False

    async def append(self, node: int, entries: List[bytes]) -> bool:
        f = self.followers[node]
        await f.window.admit()  # leak: the return after a step-down keeps the place
        if self.stepped_down:
            return False
        ok = await self.send(node, b"".join(entries))
        if ok:
            f.match += len(entries)
        f.window.dismiss()
        return ok

    async def heartbeat(self, node: int) -> bool:
        f = self.followers[node]
        if not f.window.admit_nowait():  # clean: dismissed in finally
            return False
        try:
            return await self.send(node, b"")
        finally:
            f.window.dismiss()

    async def broadcast(self, entry: bytes) -> int:
        acks = 0
        admitted: List[Follower] = []
        for f in self.followers.values():
            if f.window.admit_nowait():  # clean: near miss, every admitted one is dismissed below
                admitted.append(f)
        replies = await asyncio.gather(*(self.send(f.node, entry) for f in admitted))
        for f, ok in zip(admitted, replies):
            f.window.dismiss()
            acks += ok
        return acks

    async def quorum(self, entry: bytes) -> bool:
        acks = 1
        need = len(self.followers) // 2 + 1
        for f in self.followers.values():
            await f.window.admit()  # leak: the return at a quorum leaves the last one admitted
            if await self.send(f.node, entry):
                acks += 1
            if acks >= need:
                return True
            f.window.dismiss()
        return False

    def pipelined(self, node: int, entry: bytes) -> Optional["asyncio.Task[bool]"]:
        f = self.followers[node]
        if not f.window.admit_nowait():  # clean: near miss, the task's callback dismisses
            return None
        task = asyncio.ensure_future(self.send(node, entry))
        task.add_done_callback(lambda _t, w=f.window: w.dismiss())
        return task

    async def begin_snapshot(self, node: int) -> bool:
        f = self.followers[node]
        if f.snapshot is not None:
            return False
        f.snapshot = self.store.open_latest()  # clean: near miss, end_snapshot() and remove() close it
        return f.snapshot is not None

    async def end_snapshot(self, node: int) -> None:
        f = self.followers[node]
        index, f.snapshot = f.snapshot, None
        if index is not None:
            self.store.close(index)

    async def remove(self, node: int) -> None:
        await self.end_snapshot(node)
        del self.followers[node]

    async def install(self, node: int) -> int:
        index = self.store.open_latest()  # leak: break out on a refused chunk is past the close in else
        if index is None:
            return 0
        sent = 0
        for chunk in self.store.chunks(index):
            if not await self.send(node, chunk):
                log.warning("node %d refused chunk %d", node, sent)
                break
            sent += 1
        else:
            self.store.close(index)
        return sent

    def latest_size(self) -> int:
        index = self.store.open_latest()  # clean: closed after counting
        if index is None:
            return 0
        size = sum(len(c) for c in self.store.chunks(index))
        self.store.close(index)
        return size

    def is_behind(self, node: int) -> bool:
        index = self.store.open_latest()  # leak: never closed, the snapshot can't be pruned
        if index is None:
            return False
        return self.followers[node].match < index

    @asynccontextmanager
    async def slot(self, f: Follower) -> AsyncIterator[None]:
        await f.window.admit()  # clean: dismissed in finally
        try:
            yield
        finally:
            f.window.dismiss()

    async def barrier(self) -> int:
        """Takes a place at every follower, so that nothing else is in flight to it."""
        async with AsyncExitStack() as stack:
            for f in self.followers.values():
                await stack.enter_async_context(self.slot(f))  # clean: near miss, the stack ends it
            results = [await self.send(node, b"barrier") for node in self.followers]
            return sum(results)
