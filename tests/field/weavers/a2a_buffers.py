"""Dispatch / combine buffers for expert-parallel all-to-all."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Optional

try:
    import torch
    import torch.distributed as dist
except ImportError:
    torch = None
    dist = None

MAX_INFLIGHT = int(os.environ.get("A2A_INFLIGHT", "4"))


@dataclass(eq=False)
class CommBuf:
    rank: int
    rows: int
    payload: list = field(default_factory=list)
    registered: bool = False


class CommBufPool:
    def __init__(self, rank: int, limit: int) -> None:
        self.rank = rank
        self.limit = limit
        self.live: set[CommBuf] = set()

    def get_buf(self, rows: int) -> Optional[CommBuf]:
        if len(self.live) >= self.limit:
            return None
        buf = CommBuf(self.rank, rows)
        self.live.add(buf)
        return buf

    def put_buf(self, buf: CommBuf) -> None:
        buf.payload.clear()
        self.live.discard(buf)


class Handle:
    """An exchange in flight. `wait` completes it and returns its buffers to the pool."""

    def __init__(self, pool: CommBufPool, send: CommBuf, recv: CommBuf) -> None:
        self._pool = pool
        self.send = send
        self.recv = recv
        self._done = False

    def wait(self) -> list:
        rows = list(self.recv.payload)
        if not self._done:
            self._done = True
            self._pool.put_buf(self.send)
            self._pool.put_buf(self.recv)
        return rows


class AllToAll:
    def __init__(self, rank: int, world: int, transport) -> None:
        self.rank = rank
        self.world = world
        self.transport = transport
        self.pool = CommBufPool(rank, limit=2 * MAX_INFLIGHT)
        self._meta = self.pool.get_buf(world)  # clean: taken once for the life of the communicator
        self._inflight: dict[int, Handle] = {}

    def dispatch(self, step: int, tokens: list, splits: list[int]) -> Optional[Handle]:
        send = self.pool.get_buf(len(tokens))  # leak: lost when the receive buffer cannot be had
        if send is None:
            return None
        recv = self.pool.get_buf(sum(splits))  # clean: goes into the handle
        if recv is None:
            return None
        send.payload.extend(tokens)
        self.transport.post(send, recv, splits)
        return Handle(self.pool, send, recv)

    def combine(self, tokens: list, splits: list[int]) -> Optional[Handle]:
        send = self.pool.get_buf(len(tokens))  # clean: goes into the handle, or back
        recv = self.pool.get_buf(sum(splits))  # clean: near miss, both are tested at once and each is put back if present
        if send is None or recv is None:
            for buf in (send, recv):
                if buf is not None:
                    self.pool.put_buf(buf)
            return None
        send.payload.extend(tokens)
        self.transport.post(send, recv, splits)
        return Handle(self.pool, send, recv)

    def dispatch_async(self, step: int, tokens: list, splits: list[int]) -> bool:
        handle = self.dispatch(step, tokens, splits)  # clean: kept until finish_step
        if handle is None:
            return False
        stale = self._inflight.pop(step, None)
        if stale is not None:
            stale.wait()
        self._inflight[step] = handle
        return True

    def finish_step(self, step: int) -> list:
        handle = self._inflight.pop(step, None)
        return handle.wait() if handle is not None else []

    def round_trip(self, tokens: list, splits: list[int]) -> list:
        """Dispatch to the experts and combine back."""
        out = self.dispatch(-2, tokens, splits)  # leak: the fallback for a failed combine never waits for the dispatch
        if out is None:
            return tokens
        back = self.combine(tokens, splits)  # clean: waited for
        if back is None:
            return self.transport.slow_path(tokens, splits)
        out.wait()
        return back.wait()

    def warm_up(self, rows: int) -> None:
        for peer in range(self.world):
            if peer == self.rank:
                continue
            h = self.combine([peer] * rows, [rows])  # leak: the handle is dropped without wait, its buffers with it
            if h is not None:
                self.transport.note_warm(peer)

    def exchange_counts(self, counts: list[int]) -> list[int]:
        buf = self._meta
        buf.payload[:] = counts
        return self.transport.all_gather(buf)

    def scatter_rows(self, rows_by_peer: dict[int, list]) -> int:
        sent = 0
        for peer, rows in rows_by_peer.items():
            buf = self.pool.get_buf(len(rows))  # clean: near miss, put back before both `continue`s
            if buf is None:
                break
            if not rows:
                self.pool.put_buf(buf)
                continue
            buf.payload.extend(rows)
            ok = self.transport.push(peer, buf)
            self.pool.put_buf(buf)
            if not ok:
                continue
            sent += len(rows)
        return sent

    def reduce_rows(self, rows_by_peer: dict[int, list]) -> list:
        acc = self.pool.get_buf(0)  # leak: the first refused peer breaks off with `return` and acc is not put back
        if acc is None:
            return []
        for peer, rows in rows_by_peer.items():
            tmp = self.pool.get_buf(len(rows))  # clean: put back in the same turn, also on refusal
            if tmp is None:
                break
            tmp.payload.extend(rows)
            if not self.transport.push(peer, tmp):
                self.pool.put_buf(tmp)
                return []
            acc.payload.extend(tmp.payload)
            self.pool.put_buf(tmp)
        result = list(acc.payload)
        self.pool.put_buf(acc)
        return result

    def close(self) -> None:
        for step in list(self._inflight):
            self.finish_step(step)
        if self._meta is not None:
            self.pool.put_buf(self._meta)
            self._meta = None
