from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

from .context import KernelContext
from .typed import WorkTensor


def forward_dense(ctx: KernelContext, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    s = ctx.own(q.shape[0], k.shape[0])  # clean: disowned after the product
    np.matmul(q, k.T, out=s.data)
    np.exp(s.data, out=s.data)
    out = s.data @ v
    ctx.disown(s)
    return out


def alibi_scores(ctx: KernelContext, q: np.ndarray, k: np.ndarray, slope: float) -> np.ndarray:
    s = ctx.own(q.shape[0], k.shape[0])  # leak: zero slope returns a copy and keeps the tensor
    np.matmul(q, k.T, out=s.data)
    if slope == 0.0:
        return s.data.copy()
    s.data -= slope * np.arange(k.shape[0], dtype=np.float32)
    out = s.data.copy()
    ctx.disown(s)
    return out


def _scores(ctx: KernelContext, q: np.ndarray, k: np.ndarray) -> WorkTensor:
    t = ctx.own(q.shape[0], k.shape[0])  # clean: returned to the caller
    np.matmul(q, k.T, out=t.data)
    return t


def forward_chunked(ctx: KernelContext, q: np.ndarray, k: np.ndarray, chunk: int, reuse: bool) -> List[float]:
    sums: List[float] = []
    t: Optional[WorkTensor] = None
    for i in range(0, len(k), chunk):
        if t is not None and not reuse:
            ctx.disown(t)
        t = _scores(ctx, q, k[i : i + chunk])  # leak: with reuse the previous chunk's tensor is rebound
        sums.append(float(t.data.sum()))
    if t is not None:
        ctx.disown(t)
    return sums


def varlen_forward(ctx: KernelContext, q: np.ndarray, ks: Sequence[np.ndarray]) -> List[float]:
    live = [_scores(ctx, q, k) for k in ks if len(k)]  # clean: near miss, the while below disowns each
    sums: List[float] = []
    while live:
        t = live.pop(0)
        sums.append(float(t.data.max()))
        ctx.disown(t)
    return sums


def backward_dq(ctx: KernelContext, dout: np.ndarray, k: np.ndarray, want_bias: bool) -> np.ndarray:
    ds = _scores(ctx, dout, k)  # clean: disowned whichever branch ran
    dbias = ctx.own(k.shape[0]) if want_bias else None  # leak: never disowned, only summed
    if dbias is not None:
        dbias.data += ds.data.sum(axis=0)
        ds.data += dbias.data
    dq = ds.data @ k
    ctx.disown(ds)
    return dq


def row_max(ctx: KernelContext, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return _scores(ctx, q, k).data.max(axis=1)  # leak: the temporary is dropped after the reduction
