"""Backward pass: dk/dv travel around the ring together with the blocks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple

from .buffers import CommBufferPool, Tensor
from .comm import RingComm


@dataclass
class SavedForBackward:
    q: Any
    k: Any
    v: Any
    lse: Any
    kv_requires_grad: bool = True


def _block_backward(saved: SavedForBackward, dout: Any, dk: Tensor, dv: Tensor) -> Any:
    return dout


def _copy(x: Tensor) -> Any:
    return x.clone() if hasattr(x, "clone") else bytes(x)


def _finite(x: Any) -> bool:
    return x is not None


def ring_backward(dout: Any, saved: SavedForBackward, comm: RingComm) -> Tuple[Any, Any, Any]:
    pool = comm.pool
    pair = pool.acquire_kv()  # clean: rebound to the received pair only after release, last pair released
    if pair is None:
        raise RuntimeError("ring_backward needs two free communication buffers")
    dk, dv = pair
    dq = None
    for step in range(comm.world_size):
        dq = _block_backward(saved, dout, dk, dv)
        if step + 1 == comm.world_size:
            break
        ndk = comm.send_recv(dk)  # clean: near miss, becomes dk after the old dk is released
        ndv = comm.send_recv(dv)  # clean: near miss, becomes dv after the old dv is released
        comm.commit()
        comm.wait()
        pool.release(dk)
        pool.release(dv)
        dk, dv = ndk, ndv
    grad_k, grad_v = _copy(dk), _copy(dv)
    pool.release(dk)
    pool.release(dv)
    return dq, grad_k, grad_v


def accumulate_kv_grad(saved: SavedForBackward, dout: Any, pool: CommBufferPool) -> Optional[Tuple[Any, Any]]:
    pair = pool.acquire_kv()  # leak: frozen keys and values return with both buffers held
    if pair is None:
        return None
    if not saved.kv_requires_grad:
        return None
    dk, dv = pair
    _block_backward(saved, dout, dk, dv)
    grads = (_copy(dk), _copy(dv))
    for buf in pair:
        pool.release(buf)
    return grads


def delta_correction(saved: SavedForBackward, dout: Any, pool: CommBufferPool) -> Optional[Any]:
    delta = pool.acquire()  # clean: near miss, the early return passes through finally
    try:
        if not _finite(saved.lse):
            return None
        return _copy(delta)
    finally:
        pool.release(delta)
