"""Ring attention: rotate KV chunks around the ring with double-buffered receives."""
from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterator, Protocol


class RingTimeout(RuntimeError):
    pass


class Transport(Protocol):
    def isend(self, data: list[float], dst: int) -> Any: ...
    def irecv(self, into: list[float], src: int) -> Any: ...


@dataclass
class CommBuffer:
    slot: int
    data: list[float]


class CommBufferPool:
    def __init__(self, count: int, numel: int) -> None:
        self.numel = numel
        self._ready = deque(CommBuffer(i, [0.0] * numel) for i in range(count))
        self.out = 0

    def borrow(self) -> CommBuffer:
        if not self._ready:
            raise RingTimeout("no communication buffer")
        self.out += 1
        return self._ready.popleft()

    def try_borrow(self) -> CommBuffer | None:
        if not self._ready:
            return None
        return self.borrow()  # clean: returned to the caller

    def give_back(self, *bufs: CommBuffer | None) -> None:
        for buf in bufs:
            if buf is not None:
                self.out -= 1
                self._ready.append(buf)

    @contextmanager
    def borrowed(self) -> Iterator[CommBuffer]:
        buf = self.borrow()  # clean: given back in the finally
        try:
            yield buf
        finally:
            self.give_back(buf)

    @contextmanager
    def borrowed_pair(self) -> Iterator[tuple[CommBuffer, CommBuffer]]:
        first = self.borrow()  # leak: the second borrow may raise RingTimeout, which RingAttention.forward survives
        second = self.borrow()  # clean: given back in the finally
        try:
            yield first, second
        finally:
            self.give_back(first, second)


class Merge:
    """Running log-sum-exp merge of partial outputs, reduced to a mean here."""

    def __init__(self, numel: int) -> None:
        self.acc = [0.0] * numel
        self.n = 0

    def add(self, q: list[float], kv: list[float]) -> None:
        self.n += 1
        for i, (a, b) in enumerate(zip(q, kv)):
            self.acc[i] += (a * b - self.acc[i]) / self.n


class RingAttention:
    def __init__(self, pool: CommBufferPool, net: Transport, rank: int, world: int) -> None:
        self.pool = pool
        self.net = net
        self.rank = rank
        self.world = world
        self.pending: list[tuple[Any, CommBuffer]] = []
        self.residual: CommBuffer | None = None

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.world

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.world

    def forward(self, q: list[float], kv: list[float]) -> list[float]:
        try:
            return self._forward_double(q, kv)
        except RingTimeout:
            return self._forward_local(q, kv)

    def _forward_local(self, q: list[float], kv: list[float]) -> list[float]:
        merge = Merge(len(q))
        merge.add(q, kv)
        return merge.acc

    def _forward_double(self, q: list[float], kv: list[float]) -> list[float]:
        merge = Merge(len(q))
        with self.pool.borrowed_pair() as (cur, nxt):  # clean: near miss, the names are swapped but the scope gives both back
            cur.data[:] = kv
            for step in range(self.world):
                work = None
                if step + 1 < self.world:
                    work = [self.net.isend(cur.data, self.right), self.net.irecv(nxt.data, self.left)]
                merge.add(q, cur.data)
                if work is not None:
                    for w in work:
                        w.wait()
                    cur, nxt = nxt, cur
        return merge.acc

    def forward_rotating(self, q: list[float], kv: list[float]) -> list[float]:
        merge = Merge(len(q))
        cur = self.pool.borrow()  # clean: near miss, given back after each rotation and at the end
        cur.data[:] = kv
        for _ in range(self.world - 1):
            nxt = self.pool.try_borrow()  # clean: None-checked, becomes cur
            if nxt is None:
                break
            self.net.isend(cur.data, self.right).wait()
            self.net.irecv(nxt.data, self.left).wait()
            merge.add(q, cur.data)
            self.pool.give_back(cur)
            cur = nxt
        merge.add(q, cur.data)
        self.pool.give_back(cur)
        return merge.acc

    def backward_rotating(self, dout: list[float], kv: list[float]) -> list[float]:
        merge = Merge(len(dout))
        cur = self.pool.borrow()  # leak: the rotation rebinds cur without giving it back
        cur.data[:] = kv
        for _ in range(self.world - 1):
            nxt = self.pool.borrow()  # leak: becomes cur and is rebound in the following round
            self.net.isend(cur.data, self.right).wait()
            self.net.irecv(nxt.data, self.left).wait()
            merge.add(dout, cur.data)
            cur, nxt = nxt, cur
        merge.add(dout, cur.data)
        self.pool.give_back(cur)
        return merge.acc

    def post_receive(self) -> None:
        buf = self.pool.borrow()  # clean: pending owns it until drain()
        self.pending.append((self.net.irecv(buf.data, self.left), buf))

    def drain(self, q: list[float], merge: Merge) -> None:
        while self.pending:
            work, buf = self.pending.pop()
            work.wait()
            merge.add(q, buf.data)
            self.pool.give_back(buf)

    def gather_heads(self, heads: list[list[float]]) -> list[list[float]]:
        out = []
        works = []
        for _ in range(min(len(heads), self.world)):
            buf = self.pool.try_borrow()  # leak: an incomplete work is skipped with its buffer still out
            if buf is None:
                break
            works.append((self.net.irecv(buf.data, self.left), buf))
        for work, buf in works:
            if not work.is_completed():
                continue
            out.append(list(buf.data))
            self.pool.give_back(buf)
        return out

    def scatter_heads(self, heads: list[list[float]]) -> int:
        works = []
        for head in heads:
            buf = self.pool.try_borrow()  # clean: near miss, collected in works and all given back by the star call
            if buf is None:
                break
            buf.data[:] = head
            works.append((self.net.isend(buf.data, self.right), buf))
        for work, _ in works:
            work.wait()
        self.pool.give_back(*[buf for _, buf in works])
        return len(works)

    def save_residual(self, values: list[float]) -> None:
        if self.residual is None:
            self.residual = self.pool.borrow()  # clean: near miss, only borrowed when there is none, end_step() gives it back
        self.residual.data[:] = values

    def end_step(self) -> None:
        self.pool.give_back(self.residual)
        self.residual = None

    def reduce_once(self, values: list[float]) -> list[float]:
        with self.pool.borrowed() as buf:  # clean: scoped by the with
            buf.data[:] = values
            self.net.isend(buf.data, self.right).wait()
            if self.world == 1:
                return list(buf.data)
            self.net.irecv(buf.data, self.left).wait()
            return list(buf.data)

    def exchange_lse(self, lse: list[float]) -> list[float]:
        send = self.pool.borrow()  # clean: given back before either return
        send.data[:] = lse
        recv = self.pool.try_borrow()  # leak: not given back when the ring has one member
        self.net.isend(send.data, self.right).wait()
        self.pool.give_back(send)
        if recv is None or self.world == 1:
            return lse
        self.net.irecv(recv.data, self.left).wait()
        result = list(recv.data)
        self.pool.give_back(recv)
        return result
