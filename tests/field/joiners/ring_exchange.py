"""Ring exchange of key/value shards between sequence-parallel ranks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional


class CommBuffer:
    __slots__ = ("data", "nbytes")

    def __init__(self, nbytes: int):
        self.data = bytearray(nbytes)
        self.nbytes = nbytes

    def fill(self, src: bytes) -> None:
        self.data[: len(src)] = src


class CommBufferPool:
    """Registered communication buffers; registration is too slow for the hot path."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.out = 0
        self._free: Dict[int, List[CommBuffer]] = {}

    def get(self, nbytes: int) -> CommBuffer:
        if self.out >= self.capacity:
            raise RuntimeError("communication buffers exhausted")
        self.out += 1
        free = self._free.setdefault(nbytes, [])
        return free.pop() if free else CommBuffer(nbytes)

    def put(self, buf: CommBuffer) -> None:
        self.out -= 1
        self._free.setdefault(buf.nbytes, []).append(buf)


class LinkDown(Exception):
    pass


class Work:
    def __init__(self, src: CommBuffer, dst: CommBuffer, fail: bool = False):
        self._src, self._dst, self._fail = src, dst, fail

    def wait(self) -> None:
        if self._fail:
            raise LinkDown("peer went away")
        self._dst.fill(bytes(self._src.data))


class Link:
    """Loopback stand-in for the NCCL point-to-point pair."""

    def __init__(self):
        self.fail_next = 0

    def isendrecv(self, src: CommBuffer, dst: CommBuffer) -> Work:
        fail, self.fail_next = self.fail_next > 0, max(0, self.fail_next - 1)
        return Work(src, dst, fail)


@dataclass
class Posted:
    work: Work
    send: CommBuffer
    recv: CommBuffer


class RingExchange:
    def __init__(self, pool: CommBufferPool, link: Link, rank: int, world: int):
        self.pool = pool
        self.link = link
        self.rank = rank
        self.world = world
        self.residual: Optional[CommBuffer] = None
        self.stats: Optional[CommBuffer] = None
        self.posted: Dict[int, Posted] = {}

    def rotate(self, kv: CommBuffer) -> CommBuffer:
        """Sends kv on and returns what came in its place; kv is consumed."""
        recv = self.pool.get(kv.nbytes)  # clean: returned in place of kv
        self.link.isendrecv(kv, recv).wait()
        self.pool.put(kv)
        return recv

    def attend(self, q: int, local: bytes) -> int:
        cur = self.pool.get(len(local))  # clean: near miss, rotate consumes it
        cur.fill(local)
        acc = 0
        for step in range(self.world):
            acc += q * sum(cur.data)
            if step + 1 < self.world:
                cur = self.rotate(cur)  # clean: near miss, consumed by the next rotate or given back after the loop
        self.pool.put(cur)
        return acc

    def attend_overlapped(self, q: int, local: bytes) -> int:
        """Posts the exchange before the math so both run at once."""
        cur = self.pool.get(len(local))  # clean: given back in the loop or after it
        cur.fill(local)
        acc = 0
        for step in range(self.world):
            nxt = self.pool.get(cur.nbytes)  # leak: the one of the last step is dropped by the break
            if step == self.world - 1:
                acc += q * sum(cur.data)
                break
            work = self.link.isendrecv(cur, nxt)
            acc += q * sum(cur.data)
            work.wait()
            self.pool.put(cur)
            cur = nxt
        self.pool.put(cur)
        return acc

    def post(self, step: int, payload: bytes) -> None:
        if step in self.posted:
            raise ValueError(f"step {step} already posted")
        send = self.pool.get(len(payload))  # leak: cancel pops the entry and gives back only the receive side
        send.fill(payload)
        recv = self.pool.get(len(payload))  # clean: put by collect, cancel or drain
        self.posted[step] = Posted(self.link.isendrecv(send, recv), send, recv)

    def collect(self, step: int) -> bytes:
        op = self.posted.pop(step)
        op.work.wait()
        out = bytes(op.recv.data)
        self.pool.put(op.send)
        self.pool.put(op.recv)
        return out

    def cancel(self, step: int) -> bool:
        op = self.posted.pop(step, None)
        if op is None:
            return False
        self.pool.put(op.recv)
        return True

    def drain(self) -> None:
        while self.posted:
            _, op = self.posted.popitem()
            self.pool.put(op.recv)
            self.pool.put(op.send)

    def begin_micro_step(self, nbytes: int) -> None:
        self.residual = self.pool.get(nbytes)  # leak: overwritten by the next micro step, end_step puts the last only
        if self.stats is None:
            self.stats = self.pool.get(64)  # clean: near miss, taken only when the field is empty

    def end_step(self) -> None:
        if self.residual is not None:
            self.pool.put(self.residual)
            self.residual = None
        if self.stats is not None:
            self.pool.put(self.stats)
            self.stats = None

    def broadcast_tail(self, payload: bytes, attempts: int = 3) -> bool:
        for _ in range(attempts):
            send = self.pool.get(len(payload))  # leak: put only on success, the retry takes another
            send.fill(payload)
            recv = self.pool.get(len(payload))  # clean: finally puts it on each attempt
            try:
                self.link.isendrecv(send, recv).wait()
                self.pool.put(send)
                return True
            except LinkDown:
                continue
            finally:
                self.pool.put(recv)
        return False

    def broadcast_head(self, payload: bytes, attempts: int = 3) -> bool:
        send = self.pool.get(len(payload))  # clean: near miss, taken once before the retries, put in finally
        recv = self.pool.get(len(payload))  # clean: put in finally
        send.fill(payload)
        try:
            for _ in range(attempts):
                try:
                    self.link.isendrecv(send, recv).wait()
                except LinkDown:
                    continue
                return True
            return False
        finally:
            self.pool.put(send)
            self.pool.put(recv)
