"""Ring attention over a sequence-parallel group.

K/V shards travel around the ring in pooled communication buffers; each rank
folds the visiting shard into a running softmax.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np


class CommBufferPool:
    """Fixed number of equally shaped registered buffers."""

    def __init__(self, shape: Tuple[int, ...], count: int) -> None:
        self.shape = shape
        self._free: List[np.ndarray] = [np.zeros(shape, np.float32) for _ in range(count)]
        self._out: Dict[int, np.ndarray] = {}
        self._mu = threading.Lock()

    def lease(self) -> np.ndarray:
        with self._mu:
            buf = self._free.pop() if self._free else np.zeros(self.shape, np.float32)
            self._out[id(buf)] = buf
            return buf

    def try_lease(self) -> Optional[np.ndarray]:
        with self._mu:
            if not self._free:
                return None
            buf = self._free.pop()
            self._out[id(buf)] = buf
            return buf

    def give_back(self, buf: np.ndarray) -> None:
        with self._mu:
            del self._out[id(buf)]
            self._free.append(buf)

    @property
    def outstanding(self) -> int:
        return len(self._out)


@dataclass
class LayerSpec:
    index: int
    causal: bool = True
    reuses_kv: bool = False


class RingComm:
    def __init__(self, rank: int, world: int, pool: CommBufferPool) -> None:
        self.rank = rank
        self.world = world
        self.pool = pool

    def _sendrecv(self, send: np.ndarray, recv: np.ndarray) -> None:
        np.copyto(recv, send)

    def exchange(self, send: np.ndarray) -> np.ndarray:
        """Pass `send` on to the next rank; the result is the previous rank's shard."""
        recv = self.pool.lease()  # clean: returned to the caller
        self._sendrecv(send, recv)
        return recv


def _fold(acc: np.ndarray, lse: np.ndarray, q: np.ndarray, kv: np.ndarray) -> None:
    k, v = kv[0], kv[1]
    s = q @ k.T
    m = np.logaddexp.reduce(s, axis=-1)
    new = np.logaddexp(lse, m)
    acc *= np.exp(lse - new)[:, None]
    acc += np.exp(s - new[:, None]) @ v
    lse[...] = new


def ring_forward(comm: RingComm, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    pool = comm.pool
    acc = np.zeros_like(q)
    lse = np.full(q.shape[0], -1e30, np.float32)
    cur = pool.lease()  # clean: given back at the end of the step that used it
    np.copyto(cur, kv)
    for step in range(comm.world):
        nxt = None
        if step + 1 < comm.world:
            nxt = comm.exchange(cur)  # clean: near miss, it is cur in the next step and given back there
        _fold(acc, lse, q, cur)
        pool.give_back(cur)
        cur = nxt
    return acc


def ring_backward(comm: RingComm, q: np.ndarray, kv: np.ndarray, dout: np.ndarray) -> np.ndarray:
    pool = comm.pool
    visiting = pool.lease()  # clean: given back before every rebinding and after the loop
    np.copyto(visiting, kv)
    dkv = pool.lease()  # leak: first rotation rebinds dkv without giving the old one back
    dkv.fill(0.0)
    for step in range(comm.world):
        p = np.exp(q @ visiting[0].T)
        dkv[1] += p.T @ dout
        dkv[0] += (dout @ visiting[1].T * p).T @ q
        rotated = comm.exchange(visiting)  # clean: becomes visiting, given back after the loop
        pool.give_back(visiting)
        visiting = rotated
        dkv = comm.exchange(dkv)  # leak: rebound by the next step's rotation
    pool.give_back(visiting)
    grad = dkv.copy()
    pool.give_back(dkv)
    return grad


def zigzag_forward(comm: RingComm, q: np.ndarray, kv: np.ndarray, causal: bool) -> np.ndarray:
    """Zigzag layout: a rank never needs the shards behind its own tail chunk."""
    acc = np.zeros_like(q)
    lse = np.full(q.shape[0], -1e30, np.float32)
    held = kv
    for step in range(comm.world):
        shard = comm.exchange(held)  # leak: the causal skip continues past the give_back
        src = (comm.rank - step - 1) % comm.world
        if causal and src > comm.rank:
            continue
        _fold(acc, lse, q, shard)
        comm.pool.give_back(shard)
    return acc


def striped_forward(comm: RingComm, q: np.ndarray, kv: np.ndarray, causal: bool) -> np.ndarray:
    acc = np.zeros_like(q)
    lse = np.full(q.shape[0], -1e30, np.float32)
    for step in range(comm.world):
        src = (comm.rank - step - 1) % comm.world
        shard = comm.exchange(kv)  # clean: near miss, the continue is inside a try with finally
        try:
            if causal and src > comm.rank:
                continue
            _fold(acc, lse, q, shard)
        finally:
            comm.pool.give_back(shard)
    return acc


class KvPrefetcher:
    """Starts moving a layer's shard while the layer before is still computing."""

    def __init__(self, comm: RingComm) -> None:
        self.comm = comm
        self._incoming: Optional[np.ndarray] = None

    def begin(self, kv: np.ndarray) -> None:
        self._incoming = self.comm.exchange(kv)  # leak: overwritten by the next begin when the layer reuses kv and finish was skipped

    def finish(self, q: np.ndarray, acc: np.ndarray, lse: np.ndarray) -> None:
        buf, self._incoming = self._incoming, None
        if buf is not None:
            _fold(acc, lse, q, buf)
            self.comm.pool.give_back(buf)


def run_layers(comm: RingComm, layers: Sequence[LayerSpec], q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    acc = np.zeros_like(q)
    lse = np.full(q.shape[0], -1e30, np.float32)
    pre = KvPrefetcher(comm)
    for layer in layers:
        pre.begin(kv)
        if layer.reuses_kv:
            _fold(acc, lse, q, kv)
        else:
            pre.finish(q, acc, lse)
    return acc


def merge_pair(pool: CommBufferPool, a: np.ndarray, b: np.ndarray) -> Optional[np.ndarray]:
    left = pool.try_lease()  # leak: kept when the second buffer is refused
    if left is None:
        return None
    right = pool.try_lease()  # clean: given back after the merge
    if right is None:
        return None
    np.copyto(left, a)
    np.copyto(right, b)
    merged = left + right
    pool.give_back(right)
    pool.give_back(left)
    return merged


def swap_pair(pool: CommBufferPool, a: np.ndarray, b: np.ndarray) -> bool:
    front = pool.try_lease()  # clean: near miss, the rollback gives it back when the second is refused
    back = pool.try_lease() if front is not None else None  # clean: given back below, never held without front
    if back is None:
        if front is not None:
            pool.give_back(front)
        return False
    np.copyto(front, a)
    np.copyto(back, b)
    np.copyto(a, back)
    np.copyto(b, front)
    for buf in (front, back):
        pool.give_back(buf)
    return True


def main() -> None:
    pool = CommBufferPool((2, 4, 8), 4)
    comm = RingComm(1, 4, pool)
    q = np.ones((4, 8), np.float32) * 0.1
    kv = np.ones((2, 4, 8), np.float32) * 0.1
    ring_forward(comm, q, kv)
    striped_forward(comm, q, kv, True)
    swap_pair(pool, kv.copy(), kv.copy())
    print("outstanding", pool.outstanding)
    ring_backward(comm, q, kv, np.ones_like(q))
    zigzag_forward(comm, q, kv, True)
    run_layers(comm, [LayerSpec(0), LayerSpec(1, reuses_kv=True), LayerSpec(2)], q, kv)
    merge_pair(pool, kv, kv)
    print("outstanding", pool.outstanding)


if __name__ == "__main__":
    main()
