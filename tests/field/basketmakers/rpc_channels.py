"""Channels between prefill and decode nodes: connection pool, in-flight credits, retries."""
from __future__ import annotations

import asyncio
import heapq
import socket
import threading
import time
from typing import Any, Callable, Optional


class PeerDown(ConnectionError):
    pass


class Channel:
    def __init__(self, addr: tuple[str, int]):
        self.addr = addr
        self.sock: Optional[socket.socket] = socket.create_connection(addr)  # clean: kept in self.sock, close() closes it
        self.last_used = 0.0
        self.broken = False

    def __lt__(self, other: "Channel") -> bool:
        return self.last_used < other.last_used

    def call(self, msg: bytes) -> bytes:
        self.sock.sendall(len(msg).to_bytes(4, "big") + msg)
        head = self.sock.recv(4)
        return self.sock.recv(int.from_bytes(head, "big"))

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class ChannelPool:
    """Idle channels in a heap by last use; dial() gives None once `limit` are out."""

    def __init__(self, addr: tuple[str, int], limit: int, max_idle: float = 30.0):
        self.addr = addr
        self.limit = limit
        self.max_idle = max_idle
        self.out = 0
        self._idle: list[Channel] = []
        self._lock = threading.Lock()

    def dial(self) -> Optional[Channel]:
        with self._lock:
            while self._idle:
                ch = heapq.heappop(self._idle)  # clean: near miss, a stale channel is closed and another popped
                if time.monotonic() - ch.last_used > self.max_idle:
                    ch.close()
                    continue
                self.out += 1
                return ch
            if self.out >= self.limit:
                return None
            self.out += 1
        try:
            return Channel(self.addr)  # clean: returned to the caller
        except OSError:
            with self._lock:
                self.out -= 1
            return None

    def hang_up(self, ch: Channel) -> None:
        with self._lock:
            self.out -= 1
            if ch.broken:
                ch.close()
                return
            ch.last_used = time.monotonic()
            heapq.heappush(self._idle, ch)

    def sweep(self) -> int:
        n = 0
        keep: list[Channel] = []
        with self._lock:
            while self._idle:
                ch = heapq.heappop(self._idle)  # leak: stale channels are neither kept nor closed
                if time.monotonic() - ch.last_used > self.max_idle:
                    n += 1
                    continue
                keep.append(ch)
            self._idle = keep
        return n

    def shutdown(self) -> None:
        with self._lock:
            for ch in self._idle:
                ch.close()
            self._idle.clear()


class Lease:
    """Context manager over a pool; .ch is None if there was no channel."""

    def __init__(self, pool: ChannelPool):
        self.pool = pool
        self.ch: Optional[Channel] = None

    def __enter__(self) -> Optional[Channel]:
        self.ch = self.pool.dial()  # clean: near miss, __exit__ returns early only without a channel
        return self.ch

    def __exit__(self, exc_type, exc, tb) -> bool:
        if self.ch is None:
            return False
        if exc_type is not None:
            self.ch.broken = True
        self.pool.hang_up(self.ch)
        self.ch = None
        return False


class StickyLease:
    def __init__(self, pool: ChannelPool):
        self.pool = pool

    def __enter__(self) -> Optional[Channel]:
        self.ch = self.pool.dial()  # leak: __exit__ returns on PeerDown before hang_up()
        return self.ch

    def __exit__(self, exc_type, exc, tb) -> bool:
        if exc_type is not None and issubclass(exc_type, PeerDown):
            return True
        if self.ch is not None:
            self.pool.hang_up(self.ch)
        return False


class KVPusher:
    def __init__(self, pools: dict[str, ChannelPool], credits: threading.BoundedSemaphore):
        self.pools = pools
        self.credits = credits
        self.sessions: dict[str, tuple[str, Channel]] = {}

    def push(self, peer: str, blob: bytes) -> bool:
        with Lease(self.pools[peer]) as ch:  # clean: with hangs up
            if ch is None:
                return False
            return ch.call(blob) == b"ok"

    def push_retry(self, peer: str, blob: bytes, tries: int = 3) -> bool:
        pool = self.pools[peer]
        for i in range(tries):
            ch = pool.dial()  # leak: after OSError the loop dials again without hang_up()
            if ch is None:
                time.sleep(0.01)
                continue
            try:
                ok = ch.call(blob) == b"ok"
            except OSError:
                ch.broken = True
                continue
            pool.hang_up(ch)
            return ok
        return False

    def push_retry_closing(self, peer: str, blob: bytes, tries: int = 3) -> bool:
        pool = self.pools[peer]
        for _ in range(tries):
            ch = pool.dial()  # clean: near miss, continue in except still runs finally
            if ch is None:
                continue
            try:
                return ch.call(blob) == b"ok"
            except OSError:
                ch.broken = True
                continue
            finally:
                pool.hang_up(ch)
        return False

    def push_credit(self, peer: str, blob: bytes) -> bool:
        self.credits.acquire()  # leak: not released when there is no channel
        ch = self.pools[peer].dial()  # clean: hung up after the call
        if ch is None:
            return False
        try:
            return ch.call(blob) == b"ok"
        finally:
            self.pools[peer].hang_up(ch)
            self.credits.release()

    def open_session(self, sid: str, peer: str) -> bool:
        ch = self.pools[peer].dial()  # clean: kept in sessions until close_session()
        if ch is None:
            return False
        self.close_session(sid)
        self.sessions[sid] = (peer, ch)
        return True

    def close_session(self, sid: str) -> None:
        held = self.sessions.pop(sid, None)
        if held is not None:
            peer, ch = held
            self.pools[peer].hang_up(ch)

    def redirect(self, sid: str, peer: str) -> bool:
        ch = self.pools[peer].dial()  # leak: dropped when the session is gone
        if ch is None:
            return False
        if sid not in self.sessions:
            return False
        self.close_session(sid)
        self.sessions[sid] = (peer, ch)
        return True

    def fan_out(self, blob: bytes) -> list[str]:
        acked = []
        for peer, pool in self.pools.items():
            ch = pool.dial()  # clean: hung up whichever the answer
            if ch is None:
                continue
            try:
                answer = ch.call(blob)
            finally:
                pool.hang_up(ch)
            if answer != b"ok":
                continue
            acked.append(peer)
        return acked


class AsyncGate:
    def __init__(self, n: int):
        self._sem = asyncio.Semaphore(n)
        self.tasks: set[asyncio.Task] = set()

    async def once(self, fn: Callable[[], Any]) -> Any:
        async with self._sem:
            return await asyncio.to_thread(fn)

    async def spawn(self, fn: Callable[[], Any]) -> asyncio.Task:
        await self._sem.acquire()  # clean: near miss, released by the task's done callback
        task = asyncio.create_task(asyncio.to_thread(fn))
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self._sem.release()

    async def spawn_if(self, fn: Callable[[], Any], alive: Callable[[], bool]) -> Optional[asyncio.Task]:
        await self._sem.acquire()  # leak: not released when alive() is false
        if not alive():
            return None
        task = asyncio.create_task(asyncio.to_thread(fn))
        task.add_done_callback(self._done)
        return task
