"""Ring attention over a context-parallel group, with pooled buffers for the KV shards in flight."""
from __future__ import annotations

import collections
import logging
from dataclasses import dataclass
from typing import Callable, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np

try:
    import torch
except ImportError:  # CPU-only CI image
    torch = None

logger = logging.getLogger(__name__)


class ShardPoolExhausted(RuntimeError):
    pass


class RingTimeout(RuntimeError):
    pass


@dataclass(eq=False)
class ShardBuffer:
    index: int
    data: "np.ndarray"
    owner_rank: int = -1

    def fill_from(self, src) -> "ShardBuffer":
        self.data[...] = src
        return self


class ShardPool:
    """Fixed set of receive buffers; registering memory with the NIC is too slow to do per step."""

    def __init__(self, count: int, shape: Tuple[int, ...]) -> None:
        self._free: Deque[ShardBuffer] = collections.deque(
            ShardBuffer(i, self._alloc(shape)) for i in range(count)
        )
        self._busy: Dict[int, ShardBuffer] = {}

    @staticmethod
    def _alloc(shape):
        if torch is not None:
            return torch.zeros(shape)
        return np.zeros(shape, dtype=np.float32)

    def acquire(self) -> ShardBuffer:
        if not self._free:
            raise ShardPoolExhausted(f"{len(self._busy)} shard buffers in flight")
        buf = self._free.popleft()
        self._busy[buf.index] = buf
        return buf

    def try_acquire(self) -> Optional[ShardBuffer]:
        return self.acquire() if self._free else None  # clean: returned to the caller

    def release(self, buf: ShardBuffer) -> None:
        del self._busy[buf.index]
        buf.owner_rank = -1
        self._free.append(buf)

    @property
    def in_flight(self) -> int:
        return len(self._busy)


class RingComm:
    def __init__(self, pool: ShardPool, rank: int, world: int, exchange: Callable[[ShardBuffer, ShardBuffer], bool]) -> None:
        self.pool = pool
        self.rank = rank
        self.world = world
        self._exchange = exchange

    def stage(self, kv) -> ShardBuffer:
        buf = self.pool.acquire()  # clean: handed to the caller
        buf.owner_rank = self.rank
        return buf.fill_from(kv)

    def rotate(self, outgoing: ShardBuffer) -> ShardBuffer:
        incoming = self.pool.acquire()  # clean: given back on timeout, else handed to the caller
        if not self._exchange(outgoing, incoming):
            self.pool.release(incoming)
            raise RingTimeout(f"rank {self.rank}: neighbour did not answer")
        incoming.owner_rank = (outgoing.owner_rank - 1) % self.world
        return incoming


def _merge(acc, q, kv, causal_skip: bool = False):
    if causal_skip:
        return acc
    part = q * kv.sum()
    return part if acc is None else acc + part


def ring_forward(q, kv, comm: RingComm):
    """Plain ring: every rank sees every shard once."""
    out = None
    cur = comm.stage(kv)  # leak: rebound by cur = nxt after the first rotation
    for step in range(comm.world):
        out = _merge(out, q, cur.data)
        if step + 1 < comm.world:
            nxt = comm.rotate(cur)  # leak: all but the last received shard are rebound unreleased
            cur = nxt
    comm.pool.release(cur)
    return out


def ring_forward_striped(q, kv, comm: RingComm):
    """Striped layout, all steps do the same amount of work."""
    out = None
    cur = comm.stage(kv)  # clean: near miss, rebound only after the old buffer went back
    for step in range(comm.world):
        out = _merge(out, q, cur.data)
        if step + 1 == comm.world:
            break
        nxt = comm.rotate(cur)  # clean: near miss, becomes cur and goes back in the next turn or after the loop
        comm.pool.release(cur)
        cur = nxt
    comm.pool.release(cur)
    return out


def zigzag_forward(q, kv, comm: RingComm):
    """Two fixed buffers that trade places, the way the fused kernel wants them."""
    cur = comm.stage(kv)  # clean: near miss, the swap keeps both names and both go back
    spare = comm.pool.acquire()  # clean: near miss, same
    out = None
    try:
        for step in range(comm.world):
            out = _merge(out, q, cur.data, causal_skip=cur.owner_rank > comm.rank)
            spare.fill_from(cur.data)
            spare.owner_rank = (cur.owner_rank - 1) % comm.world
            cur, spare = spare, cur
    finally:
        comm.pool.release(spare)
        comm.pool.release(cur)
    return out


def ring_backward(dout, kv, comm: RingComm):
    """Returns (dq, dkv) or None where the caller should fall back to the gathered path."""
    cur = comm.stage(kv)  # leak: not given back when no gradient buffer is free
    dkv = comm.pool.try_acquire()  # clean: None-checked, released below
    if dkv is None:
        logger.warning("ring backward: no buffer for dkv, %d in flight", comm.pool.in_flight)
        return None
    dkv.fill_from(0.0)
    dq = _merge(None, dout, cur.data)
    dkv.data[...] += float(dout.sum())
    grad = dkv.data.copy()
    comm.pool.release(dkv)
    comm.pool.release(cur)
    return dq, grad


def neighbour_lse(lse, comm: RingComm):
    """One-hop exchange of the log-sum-exp, for the correction of the output of the last block."""
    mine = comm.stage(lse)  # clean: released once the hop is done
    try:
        return comm.rotate(mine).data.copy()  # leak: received buffer is copied and dropped
    finally:
        comm.pool.release(mine)


def neighbour_max(lse, comm: RingComm) -> float:
    mine = comm.stage(lse)  # clean: released in the finally
    theirs: Optional[ShardBuffer] = None
    try:
        theirs = comm.rotate(mine)  # clean: near miss, released under the None check
        return float(max(mine.data.max(), theirs.data.max()))
    except RingTimeout:
        return float(mine.data.max())
    finally:
        if theirs is not None:
            comm.pool.release(theirs)
        comm.pool.release(mine)


def prefill_chunks(q, chunks: Sequence["np.ndarray"], comm: RingComm, window: int) -> List[float]:
    """Chunked prefill with a sliding window; chunks behind the window contribute nothing."""
    scores: List[float] = []
    for i, chunk in enumerate(chunks):
        buf = comm.stage(chunk)  # leak: the continue for chunks behind the window skips the release
        if len(chunks) - i > window:
            scores.append(0.0)
            continue
        scores.append(float(_merge(None, q, buf.data).sum()))
        comm.pool.release(buf)
    return scores


def overlapped_step(q, cur: ShardBuffer, comm: RingComm):
    """Computes on `cur` while the next shard arrives; the caller keeps `cur`."""
    mask_buf = comm.pool.acquire()  # leak: lost when the timeout is caught and None returned
    mask_buf.fill_from(1.0)
    try:
        nxt = comm.rotate(cur)  # clean: returned to the caller
        part = _merge(None, q, cur.data * mask_buf.data)
    except RingTimeout as exc:
        logger.error("ring step dropped: %s", exc)
        return None
    comm.pool.release(mask_buf)
    return part, nxt


def overlapped_pass(q, kv, comm: RingComm):
    cur = comm.stage(kv)  # clean: near miss, released on both ways out
    stepped = overlapped_step(q, cur, comm)  # clean: second element of the pair is released
    comm.pool.release(cur)
    if stepped is None:
        return None
    part, nxt = stepped
    comm.pool.release(nxt)
    return part
