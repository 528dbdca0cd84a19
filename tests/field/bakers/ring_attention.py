"""Ring attention over a sequence-parallel group, with leased exchange buffers."""
from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Callable, DefaultDict, Dict, List, NamedTuple, Optional, Tuple

log = logging.getLogger("ring_attn")


class PeerTimeout(Exception):
    pass


class RingBuffer:
    def __init__(self, tag: int, size: int) -> None:
        self.tag = tag
        self.kv: List[float] = [0.0] * size
        self.users = 0

    def clone(self) -> List[float]:
        return list(self.kv)


class RingBufferPool:
    def __init__(self, size: int, cap: int) -> None:
        self.size = size
        self.cap = cap
        self._made = 0
        self._spare: List[RingBuffer] = []

    def borrow(self) -> RingBuffer:
        if self._spare:
            return self._spare.pop()
        if self._made >= self.cap:
            raise MemoryError("ring buffers exhausted")
        self._made += 1
        return RingBuffer(self._made, self.size)

    def give_back(self, buf: RingBuffer) -> None:
        self._spare.append(buf)

    def borrow_pair(self) -> Tuple[RingBuffer, RingBuffer]:
        send = self.borrow()  # clean: given back in the handler, else returned
        try:
            recv = self.borrow()  # clean: near miss, the handler only runs when this very call failed
        except MemoryError:
            self.give_back(send)
            raise
        return send, recv


class P2P:
    """Point to point transport; replaced by NCCL groups in production."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.mail: DefaultDict[int, List[List[float]]] = defaultdict(list)

    def exchange(self, send: RingBuffer, recv: RingBuffer) -> None:
        if self.world < 1:
            raise PeerTimeout("no peers")
        recv.kv[:] = send.kv


class Partial(NamedTuple):
    out: float
    lse: float


class RingAttention:
    def __init__(self, pool: RingBufferPool, p2p: P2P, causal: bool = True) -> None:
        self.pool = pool
        self.p2p = p2p
        self.causal = causal
        self._saved: Dict[int, RingBuffer] = {}

    def _block(self, q: List[float], kv: List[float]) -> Partial:
        return Partial(sum(a * b for a, b in zip(q, kv)), float(len(kv)))

    def forward(self, q: List[float], kv: List[float]) -> float:
        cur, nxt = self.pool.borrow_pair()  # clean: near miss, swapped by rebinding, both given back at the end
        cur.kv[:len(kv)] = kv
        acc = 0.0
        for hop in range(self.p2p.world):
            if hop + 1 < self.p2p.world:
                self.p2p.exchange(cur, nxt)
            if not self.causal or hop <= self.p2p.rank:
                acc += self._block(q, cur.kv).out
            cur, nxt = nxt, cur
        self.pool.give_back(cur)
        self.pool.give_back(nxt)
        return acc

    def forward_single(self, q: List[float], kv: List[float]) -> float:
        """Variant with one receive buffer per hop."""
        cur = self.pool.borrow()  # leak: rebound to the received buffer on the first hop
        cur.kv[:len(kv)] = kv
        acc = self._block(q, cur.kv).out
        for _ in range(1, self.p2p.world):
            recv = self.pool.borrow()  # leak: becomes cur, which the next hop rebinds
            self.p2p.exchange(cur, recv)
            cur = recv
            acc += self._block(q, cur.kv).out
        self.pool.give_back(cur)
        return acc

    def forward_handoff(self, q: List[float], kv: List[float]) -> float:
        cur = self.pool.borrow()  # clean: given back before each rebinding and at the end
        cur.kv[:len(kv)] = kv
        acc = self._block(q, cur.kv).out
        for _ in range(1, self.p2p.world):
            recv = self.pool.borrow()  # clean: near miss, becomes cur after the former was given back
            self.p2p.exchange(cur, recv)
            self.pool.give_back(cur)
            cur = recv
            acc += self._block(q, cur.kv).out
        self.pool.give_back(cur)
        return acc

    def _received(self, kv: List[float]) -> RingBuffer:
        recv = self.pool.borrow()  # clean: returned
        recv.kv[:len(kv)] = kv
        return recv

    def gather_kv(self, chunks: List[List[float]]) -> List[List[float]]:
        rows = []
        for chunk in chunks:
            rows.append(self._received(chunk).clone())  # leak: cloned and dropped
        return rows

    def save_for_backward(self, layer: int, kv: List[float]) -> None:
        old = self._saved.pop(layer, None)
        if old is not None:
            self.pool.give_back(old)
        self._saved[layer] = self._received(kv)  # clean: near miss, the former entry was given back, backward gives this one back

    def backward(self, layer: int, dout: List[float]) -> float:
        buf = self._saved.pop(layer)
        try:
            return self._block(dout, buf.kv).out
        finally:
            self.pool.give_back(buf)

    def reset(self) -> None:
        for buf in self._saved.values():
            self.pool.give_back(buf)
        self._saved.clear()


class RetryingExchange:
    def __init__(self, pool: RingBufferPool, p2p: P2P, attempts: int = 3) -> None:
        self.pool = pool
        self.p2p = p2p
        self.attempts = attempts

    def fetch(self, send: RingBuffer) -> Optional[RingBuffer]:
        for attempt in range(self.attempts):
            recv = self.pool.borrow()  # leak: each failed attempt borrows anew without giving back
            try:
                self.p2p.exchange(send, recv)
            except PeerTimeout:
                log.warning("exchange attempt %d timed out", attempt)
                time.sleep(0)
                continue
            return recv
        return None

    def fetch_once_allocated(self, send: RingBuffer) -> Optional[RingBuffer]:
        recv = self.pool.borrow()  # clean: near miss, one buffer for all attempts, given back when they run out
        for attempt in range(self.attempts):
            try:
                self.p2p.exchange(send, recv)
                return recv
            except PeerTimeout:
                log.warning("exchange attempt %d timed out", attempt)
        self.pool.give_back(recv)
        return None

    def relay(self, kv: List[float], sink: Callable[[List[float]], None]) -> bool:
        send = self.pool.borrow()  # leak: not given back when the fetch yields nothing
        send.kv[:len(kv)] = kv
        recv = self.fetch_once_allocated(send)  # clean: None holds nothing, else given back below
        if recv is None:
            return False
        sink(recv.clone())
        self.pool.give_back(recv)
        self.pool.give_back(send)
        return True


def zigzag_order(pool: RingBufferPool, chunks: List[List[float]]) -> List[List[float]]:
    held = [pool.borrow() for _ in chunks]  # clean: all given back in the last loop
    for buf, chunk in zip(held, chunks):
        buf.kv[:len(chunk)] = chunk
    order = [b.clone() for b in held[::2]] + [b.clone() for b in held[1::2]]
    for buf in held:
        pool.give_back(buf)
    return order
