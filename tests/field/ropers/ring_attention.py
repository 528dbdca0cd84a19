"""Ring attention: K/V chunks travel round the ring through borrowed double buffers."""
from __future__ import annotations

from typing import Generator, List, NamedTuple, Optional, Tuple


class Chunk:
    def __init__(self, cid: int, width: int) -> None:
        self.cid = cid
        self.rows: List[float] = [0.0] * width

    def copy_(self, other: "Chunk") -> "Chunk":
        self.rows[:] = other.rows
        return self

    def clone(self) -> List[float]:
        return list(self.rows)


class RingArena:
    def __init__(self, n: int, width: int) -> None:
        self._spare = [Chunk(i, width) for i in range(n)]
        self.lent = 0

    def borrow(self) -> Chunk:
        if not self._spare:
            raise RuntimeError("ring arena empty")
        self.lent += 1
        return self._spare.pop()

    def give_back(self, chunk: Optional[Chunk]) -> None:
        if chunk is None:
            return
        self.lent -= 1
        self._spare.append(chunk)

    def borrow_pair(self) -> Tuple[Chunk, Chunk]:
        k = self.borrow()  # clean: handed to the caller
        v = self.borrow()  # clean: handed to the caller
        return k, v


class KV(NamedTuple):
    k: Chunk
    v: Chunk


class RingComm:
    def __init__(self, arena: RingArena, rank: int, world: int) -> None:
        self.arena = arena
        self.rank, self.world = rank, world
        self._inflight: List[KV] = []

    def send_recv(self, kv: KV) -> KV:
        k = self.arena.borrow()  # clean: returned inside the KV
        v = self.arena.borrow()  # clean: returned inside the KV
        k.copy_(kv.k)
        v.copy_(kv.v)
        return KV(k, v)

    def post(self, kv: KV) -> None:
        nxt = self.send_recv(kv)  # clean: queued, wait hands it on and abort gives it back
        self._inflight.append(nxt)

    def wait(self) -> KV:
        return self._inflight.pop(0)

    def abort(self) -> None:
        for kv in self._inflight:
            free_kv(self.arena, kv)
        self._inflight.clear()


def free_kv(arena: RingArena, kv: KV) -> None:
    arena.give_back(kv.k)
    arena.give_back(kv.v)


def score(q: List[float], kv: KV) -> float:
    return sum(a * b for a, b in zip(q, kv.k.rows)) + sum(kv.v.rows)


def ring_forward(comm: RingComm, q: List[float], local: KV) -> float:
    out, cur = 0.0, local
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = comm.send_recv(cur)  # leak: cur is rebound without freeing the chunk received before
        out += score(q, cur)
        if nxt is not None:
            cur = nxt
    return out


def ring_forward_double(comm: RingComm, q: List[float], local: KV) -> float:
    out, cur = 0.0, local
    for step in range(comm.world):
        last = step + 1 == comm.world
        nxt = None if last else comm.send_recv(cur)  # clean: near miss, the previous cur is freed unless it is the caller's
        out += score(q, cur)
        if cur is not local:
            free_kv(comm.arena, cur)
        if nxt is not None:
            cur = nxt
    return out


def causal_forward(comm: RingComm, q: List[float], local: KV) -> float:
    out = score(q, local)
    for step in range(1, comm.world):
        kv = comm.send_recv(local)  # leak: continue for chunks in the causal future skips the free
        if step > comm.rank:
            continue
        out += score(q, kv)
        free_kv(comm.arena, kv)
    return out


def causal_forward_skip(comm: RingComm, q: List[float], local: KV) -> float:
    out = score(q, local)
    for step in range(1, comm.world):
        if step > comm.rank:
            continue
        kv = comm.send_recv(local)  # clean: the skip comes before the receive
        out += score(q, kv)
        free_kv(comm.arena, kv)
    return out


def overlapped(comm: RingComm, q: List[float], local: KV, steps: int) -> float:
    out = score(q, local)
    comm.post(local)
    for i in range(steps):
        kv = comm.wait()
        if i + 1 < steps:
            comm.post(kv)
        out += score(q, kv)
        free_kv(comm.arena, kv)
    comm.abort()
    return out


def iter_chunks(arena: RingArena, blocks: List[List[float]]) -> Generator[Chunk, None, None]:
    for block in blocks:
        chunk = arena.borrow()  # clean: given back in finally after each yield
        try:
            chunk.rows[:len(block)] = block
            yield chunk
        finally:
            arena.give_back(chunk)


def lend_chunks(arena: RingArena, blocks: List[List[float]]) -> Generator[Chunk, None, None]:
    """Yields chunks; the consumer gives each of them back."""
    for block in blocks:
        chunk = arena.borrow()  # clean: ownership passes to the consumer
        chunk.rows[:len(block)] = block
        yield chunk


def sum_chunks(arena: RingArena, blocks: List[List[float]]) -> float:
    total = 0.0
    for chunk in lend_chunks(arena, blocks):  # clean: each chunk is given back
        total += sum(chunk.rows)
        arena.give_back(chunk)
    return total


def first_nonzero(arena: RingArena, blocks: List[List[float]]) -> Optional[float]:
    for chunk in lend_chunks(arena, blocks):  # leak: return inside the loop drops the current chunk
        total = sum(chunk.rows)
        if total:
            return total
        arena.give_back(chunk)
    return None


def backward(arena: RingArena, kv: KV, need_dk: bool, need_dv: bool):
    dk = arena.borrow() if need_dk else None  # clean: near miss, give_back accepts None
    dv = arena.borrow() if need_dv else None  # clean: near miss, give_back accepts None
    if dk is not None:
        dk.copy_(kv.k)
    if dv is not None:
        dv.copy_(kv.v)
    grads = (dk.clone() if dk else None, dv.clone() if dv else None)
    arena.give_back(dk)
    arena.give_back(dv)
    return grads


def backward_fused(arena: RingArena, kv: KV, need_dk: bool, need_dv: bool):
    acc = None
    if need_dk or need_dv:
        acc = arena.borrow()  # leak: given back only if both gradients are needed
        acc.copy_(kv.k if need_dk else kv.v)
    grad = acc.clone() if acc is not None else None
    if need_dk and need_dv:
        arena.give_back(acc)
    return grad


def lse_correction(arena: RingArena, kv: KV) -> List[float]:
    a, b = arena.borrow_pair()  # leak: b is never given back
    a.copy_(kv.k)
    b.copy_(kv.v)
    out = [x + y for x, y in zip(a.rows, b.rows)]
    arena.give_back(a)
    return out


def snapshot(arena: RingArena, kv: KV) -> List[float]:
    return arena.borrow().copy_(kv.k).clone()  # leak: the borrowed chunk is cloned and dropped


def swap(arena: RingArena, kv: KV) -> None:
    tmp = arena.borrow()  # clean: given back below
    tmp.copy_(kv.k)
    kv.k.copy_(kv.v)
    kv.v.copy_(tmp)
    arena.give_back(tmp)


if __name__ == "__main__":
    ar = RingArena(16, 4)
    home = KV(*ar.borrow_pair())  # clean: freed at the end of the script
    c = RingComm(ar, 1, 4)
    q0 = [1.0] * 4
    ring_forward_double(c, q0, home)
    causal_forward_skip(c, q0, home)
    overlapped(c, q0, home, 3)
    sum_chunks(ar, [[1.0], [2.0]])
    assert sum(len(ch.rows) for ch in iter_chunks(ar, [[1.0]])) == 4  # clean: the generator gives back
    swap(ar, home)
    free_kv(ar, home)
    assert ar.lent == 0, ar.lent
