from __future__ import annotations

from typing import Any

from .comm import RingComm
from .pool import TensorPool


def _block_attention(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    """Fused flash step, accumulates into out and lse."""


def _block_backward(dout: Any, q: Any, k: Any, v: Any, dq: Any) -> None:
    """Fused flash backward step, accumulates into dq."""


def ring_forward(q: Any, k: Any, v: Any, comm: RingComm, pool: TensorPool) -> tuple[Any, Any]:
    out = pool.checkout_zeroed(q.shape, q.dtype)  # clean: returned
    lse = pool.checkout_zeroed(q.shape[:-1], q.dtype)  # clean: returned
    cur_k, cur_v = k, v
    for step in range(comm.world):
        next_k = next_v = None
        if step + 1 < comm.world:
            next_k = comm.exchange(cur_k)  # leak: cur_k is rebound each round and never checked in
            next_v = comm.exchange(cur_v)  # leak: cur_v is rebound each round and never checked in
        _block_attention(q, cur_k, cur_v, out, lse)
        if next_k is not None:
            cur_k, cur_v = next_k, next_v
    return out, lse


def ring_backward(dout: Any, q: Any, k: Any, v: Any, comm: RingComm, pool: TensorPool) -> Any:
    dq = pool.checkout_zeroed(q.shape, q.dtype)  # clean: returned
    cur_k, cur_v = k, v
    for step in range(comm.world):
        next_k = next_v = None
        if step + 1 < comm.world:
            next_k = comm.exchange(cur_k)  # clean: near miss, every received block is checked in, the first is the caller's
            next_v = comm.exchange(cur_v)  # clean: near miss, as for next_k
        _block_backward(dout, q, cur_k, cur_v, dq)
        if next_k is not None:
            if step > 0:
                pool.checkin(cur_k)
                pool.checkin(cur_v)
            cur_k, cur_v = next_k, next_v
    if comm.world > 1:
        pool.checkin(cur_k)
        pool.checkin(cur_v)
    return dq


class RingAttention:
    def __init__(self, pool: TensorPool, comm: RingComm) -> None:
        self.pool = pool
        self.comm = comm
        self._saved: dict[int, tuple[Any, Any]] = {}

    def infer(self, q: Any, k: Any, v: Any) -> Any:
        out, lse = ring_forward(q, k, v, self.comm, self.pool)  # leak: lse is dropped
        result = out.clone()
        self.pool.checkin(out)
        return result

    def forward(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        if layer in self._saved:
            raise RuntimeError(f"layer {layer} has an outstanding forward")
        out, lse = ring_forward(q, k, v, self.comm, self.pool)  # clean: both kept in _saved, checked in by backward
        self._saved[layer] = (out, lse)
        return out

    def backward(self, layer: int, dout: Any, q: Any, k: Any, v: Any, grads: dict[int, Any]) -> None:
        out, lse = self._saved.pop(layer)
        try:
            dq = ring_backward(dout, q, k, v, self.comm, self.pool)  # leak: only a clone is kept
            grads[layer] = dq.clone()
        finally:
            self.pool.checkin(out)
            self.pool.checkin(lse)

    def warmup(self, shape: tuple[int, ...], dtype: Any) -> None:
        with self.pool.scoped(shape, dtype) as q, self.pool.scoped(shape, dtype) as k:  # clean: with gives both back
            self.comm.post(k)  # clean: collected below
            for got in self.comm.collect():
                _block_attention(q, got, got, q, q)
                self.pool.checkin(got)
