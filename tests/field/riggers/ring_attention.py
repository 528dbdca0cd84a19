"""Ring attention over a sequence-parallel group: key/value blocks travel round the ring, one hop per step."""
from __future__ import annotations

import threading
from typing import Protocol

import torch
import torch.distributed as dist


class KVPool(Protocol):
    def lend(self) -> torch.Tensor: ...

    def recoup(self, block: torch.Tensor) -> None: ...


class DeviceKVPool:
    def __init__(self, blocks: int, shape: tuple[int, ...], dtype=torch.bfloat16):
        self._stack = [torch.empty(shape, dtype=dtype, device="cuda") for _ in range(blocks)]
        self._out = 0
        self._cond = threading.Condition()

    def lend(self) -> torch.Tensor:
        with self._cond:
            while not self._stack:
                self._cond.wait()
            self._out += 1
            return self._stack.pop()

    def recoup(self, block: torch.Tensor) -> None:
        with self._cond:
            self._out -= 1
            self._stack.append(block)
            self._cond.notify()

    def lend_many(self, n: int) -> list[torch.Tensor]:
        return [self.lend() for _ in range(n)]  # clean: handed to the caller as a list

    def recoup_many(self, blocks: list[torch.Tensor]) -> None:
        for b in blocks:
            self.recoup(b)


class RingComm:
    def __init__(self, group, rank: int, world: int):
        self.group = group
        self.next = (rank + 1) % world
        self.prev = (rank - 1) % world
        self.rank = rank
        self.world = world
        self._ops: list = []

    def shift(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        ops = [
            dist.P2POp(dist.isend, send, self.next, self.group),
            dist.P2POp(dist.irecv, recv, self.prev, self.group),
        ]
        self._ops = dist.batch_isend_irecv(ops)

    def join(self) -> None:
        for op in self._ops:
            op.wait()
        self._ops = []


def merge(out, lse, o2, l2):
    if out is None:
        return o2.float(), l2
    m = torch.maximum(lse, l2)
    a, b = torch.exp(lse - m), torch.exp(l2 - m)
    return (out * a + o2 * b) / (a + b), m + torch.log(a + b)


def ring_forward(pool: KVPool, comm: RingComm, attend, q, kv) -> torch.Tensor:
    """Full attention. `attend(q, block)` gives the partial output and its log-sum-exp."""
    out, lse = None, None
    cur = pool.lend()  # clean: near miss, swapped with nxt, both go back after the loop
    nxt = pool.lend()  # clean: goes back after the loop
    cur.copy_(kv)
    for step in range(comm.world):
        more = step + 1 < comm.world
        if more:
            comm.shift(cur, nxt)
        out, lse = merge(out, lse, *attend(q, cur))
        if more:
            comm.join()
            cur, nxt = nxt, cur
    pool.recoup(cur)
    pool.recoup(nxt)
    return out


def ring_forward_lazy(pool: KVPool, comm: RingComm, attend, q, kv) -> torch.Tensor:
    """As above, but the receive block is borrowed only for the hop."""
    out, lse = None, None
    cur = pool.lend()  # leak: replaced by the received block after the first hop
    cur.copy_(kv)
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = pool.lend()  # leak: becomes cur and is replaced in its turn, only the last one goes back
            comm.shift(cur, nxt)
        out, lse = merge(out, lse, *attend(q, cur))
        if nxt is not None:
            comm.join()
            cur = nxt
    pool.recoup(cur)
    return out


def ring_forward_handover(pool: KVPool, comm: RingComm, attend, q, kv) -> torch.Tensor:
    out, lse = None, None
    cur = pool.lend()  # clean: near miss, each block goes back before the next one takes its name
    cur.copy_(kv)
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = pool.lend()  # clean: becomes cur, which is given back at the next hop or at the end
            comm.shift(cur, nxt)
        out, lse = merge(out, lse, *attend(q, cur))
        if nxt is not None:
            comm.join()
            pool.recoup(cur)
            cur = nxt
    pool.recoup(cur)
    return out


def ring_forward_causal(pool: KVPool, comm: RingComm, attend, q, kv) -> torch.Tensor:
    """Causal variant: blocks of later ranks are forwarded but not attended to."""
    out, lse = None, None
    held = pool.lend()  # clean: given back after the loop
    held.copy_(kv)
    for step in range(comm.world):
        owner = (comm.rank - step) % comm.world
        partial = pool.lend()  # leak: blocks above the diagonal leave by the continue without recoup
        if owner > comm.rank:
            comm.shift(held, partial)
            comm.join()
            held.copy_(partial)
            continue
        partial.copy_(held)
        out, lse = merge(out, lse, *attend(q, partial))
        if step + 1 < comm.world:
            comm.shift(partial, held)
            comm.join()
        pool.recoup(partial)
    pool.recoup(held)
    return out


def zigzag_blocks(pool: DeviceKVPool, kv: torch.Tensor, world: int):
    """Early and late half of the local sequence in blocks of their own, None for the part that is empty."""
    early = pool.lend()  # clean: handed on in the pair
    half = kv.shape[0] // 2
    early[:half].copy_(kv[:half])
    if world == 1:
        return early, None
    late = pool.lend()  # clean: handed on in the pair
    late[:half].copy_(kv[half:])
    return early, late


def zigzag_forward(pool: DeviceKVPool, world: int, attend, q, kv) -> torch.Tensor:
    early, late = zigzag_blocks(pool, kv, world)  # clean: near miss, late is None exactly when world is one
    out, lse = attend(q, early)
    if late is not None:
        out, lse = merge(out, lse, *attend(q, late))
        pool.recoup(late)
    pool.recoup(early)
    return out


def zigzag_scores(pool: DeviceKVPool, world: int, q, kv) -> tuple[float, float]:
    early, late = zigzag_blocks(pool, kv, world)  # leak: with a late half its block is never recouped
    first = float((q * early).sum())
    second = float((q * late).sum()) if late is not None else 0.0
    pool.recoup(early)
    return first, second


class RingBackward:
    """Accumulates dK and dV while the blocks travel; the accumulators travel along."""

    def __init__(self, pool: DeviceKVPool, comm: RingComm):
        self.pool = pool
        self.comm = comm
        self.dk: torch.Tensor | None = None
        self.dv: torch.Tensor | None = None
        self.inbox: list[torch.Tensor] = []
        self.mask_rows: torch.Tensor | None = None

    def begin(self, masked: bool) -> None:
        self.dk = self.pool.lend().zero_()  # clean: finish recoups it
        self.dv = self.pool.lend().zero_()  # leak: finish clears the attribute before its recoup test
        self.inbox = self.pool.lend_many(2)  # clean: finish recoups the list
        if masked:
            self.mask_rows = self.pool.lend()  # clean: near miss, finish tests for None

    def hop(self) -> None:
        self.comm.shift(self.dk, self.inbox[0])
        self.comm.join()
        self.dk, self.inbox[0] = self.inbox[0], self.dk
        self.comm.shift(self.dv, self.inbox[1])
        self.comm.join()
        self.dv, self.inbox[1] = self.inbox[1], self.dv

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        grads = self.dk.clone(), self.dv.clone()
        self.pool.recoup(self.dk)
        self.dk = self.dv = None
        if self.dv is not None:
            self.pool.recoup(self.dv)
        self.pool.recoup_many(self.inbox)
        self.inbox = []
        if self.mask_rows is not None:
            self.pool.recoup(self.mask_rows)
            self.mask_rows = None
        return grads
