"""Workspaces for split-KV attention, and the layers of helpers above them."""
from __future__ import annotations

import math
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

try:
    import torch
except ImportError:
    torch = None


class PooledTensor:
    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.values: List[float] = [0.0] * numel

    def copy_from(self, src: Sequence[float]) -> "PooledTensor":
        self.values[: len(src)] = list(src)
        return self

    def clone(self) -> List[float]:
        return list(self.values)


class WorkspacePool:
    """Size-bucketed. `lend` never fails, it allocates when the bucket is empty."""

    def __init__(self) -> None:
        self._buckets: Dict[int, List[PooledTensor]] = {}
        self._lock = threading.Lock()
        self.outstanding = 0

    @staticmethod
    def bucket(numel: int) -> int:
        return 1 << max(4, math.ceil(math.log2(max(numel, 1))))

    def lend(self, numel: int) -> PooledTensor:
        size = self.bucket(numel)
        with self._lock:
            self.outstanding += 1
            stack = self._buckets.get(size)
            if stack:
                return stack.pop()
        return PooledTensor(size)

    def restore(self, ws: PooledTensor) -> None:
        with self._lock:
            self.outstanding -= 1
            self._buckets.setdefault(ws.numel, []).append(ws)


_POOL: Optional[WorkspacePool] = None


def get_pool() -> WorkspacePool:
    global _POOL
    if _POOL is None:
        _POOL = WorkspacePool()
    return _POOL


def lend_workspace(numel: int) -> PooledTensor:
    return get_pool().lend(numel)  # clean: wrapper, handed to the caller


def restore_workspace(ws: Optional[PooledTensor]) -> None:
    if ws is not None:
        get_pool().restore(ws)


def lend_for_heads(heads: int, dim: int) -> PooledTensor:
    return lend_workspace(heads * dim)  # clean: wrapper of the wrapper, handed on


@contextmanager
def scratch(numel: int) -> Iterator[PooledTensor]:
    ws = lend_workspace(numel)  # clean: restored in finally
    try:
        yield ws
    finally:
        restore_workspace(ws)


class MaybeOwned:
    """A tensor with a note on whether it came from the pool."""

    def __init__(self, tensor: PooledTensor, owned: bool) -> None:
        self.tensor = tensor
        self.owned = owned

    def done(self) -> None:
        if self.owned:
            self.owned = False
            restore_workspace(self.tensor)


def contiguous(rows: List[List[float]], out: Optional[PooledTensor] = None) -> MaybeOwned:
    flat = [v for row in rows for v in row]
    if out is not None:
        return MaybeOwned(out.copy_from(flat), owned=False)
    ws = lend_workspace(len(flat))  # clean: near miss, wrapped with owned=True, done() restores
    return MaybeOwned(ws.copy_from(flat), owned=True)


def softmax(scores: Sequence[float]) -> PooledTensor:
    ws = lend_workspace(len(scores))  # clean: handed to the caller
    top = max(scores)
    exps = [math.exp(s - top) for s in scores]
    denom = sum(exps)
    return ws.copy_from([e / denom for e in exps])


def attend(scores: Sequence[float], values: Sequence[float]) -> float:
    probs = softmax(scores)  # clean: restored before return
    out = sum(p * v for p, v in zip(probs.values, values))
    restore_workspace(probs)
    return out


def attention_probs(scores: Sequence[float]) -> List[float]:
    return softmax(scores).clone()[: len(scores)]  # leak: cloned, the pooled tensor is dropped


def attention_entropy(scores: Sequence[float]) -> float:
    probs = softmax(scores)  # leak: a single score returns early
    if len(scores) == 1:
        return 0.0
    ent = -sum(p * math.log(p) for p in probs.values[: len(scores)] if p > 0)
    restore_workspace(probs)
    return ent


def merge_states(parts: List[Tuple[float, List[float]]], dim: int) -> List[float]:
    """Log-sum-exp merge of split-KV partial results."""
    acc = lend_for_heads(1, dim)  # leak: rebound by the second partial result on
    acc.copy_from([0.0] * dim)
    total = 0.0
    for lse, vec in parts:
        weight = math.exp(lse)
        total += weight
        acc = lend_for_heads(1, dim).copy_from([a + weight * v for a, v in zip(acc.values, vec)])  # leak: each pass rebinds acc, only the last is restored
    result = [v / total for v in acc.values[:dim]]
    restore_workspace(acc)
    return result


def merge_in_place(parts: List[Tuple[float, List[float]]], dim: int) -> List[float]:
    acc = lend_for_heads(1, dim)  # clean: near miss, copy_from returns the same tensor
    acc = acc.copy_from([0.0] * dim)
    total = 0.0
    for lse, vec in parts:
        weight = math.exp(lse)
        total += weight
        acc = acc.copy_from([a + weight * v for a, v in zip(acc.values, vec)])
    result = [v / total for v in acc.values[:dim]]
    restore_workspace(acc)
    return result


def rope(values: List[float], out: Optional[PooledTensor] = None) -> List[float]:
    allocated = out is None
    if allocated:
        out = lend_workspace(len(values))  # clean: near miss, restored under the same flag
    out.copy_from([-v for v in values])
    rotated = out.clone()[: len(values)]
    if allocated:
        restore_workspace(out)
    return rotated


def quantize(values: List[float], out: Optional[PooledTensor] = None) -> Tuple[float, List[int]]:
    own = out is None
    ws = lend_workspace(len(values)) if own else out  # leak: an all-zero input returns without restore
    scale = max(abs(v) for v in values) / 127.0
    if scale == 0.0:
        return 0.0, [0] * len(values)
    ws.copy_from([v / scale for v in values])
    q = [round(v) for v in ws.values[: len(values)]]
    if own:
        restore_workspace(ws)
    return scale, q


class AttentionLayer:
    def __init__(self, heads: int, dim: int, cache_lse: bool = False) -> None:
        self.heads = heads
        self.dim = dim
        self.cache_lse = cache_lse
        self._lse: Optional[PooledTensor] = None
        self._plan: Optional[PooledTensor] = None

    def plan(self, lens: List[int]) -> None:
        if self._plan is not None and self._plan.numel < len(lens):
            restore_workspace(self._plan)
            self._plan = None
        if self._plan is None:
            self._plan = lend_workspace(len(lens))  # clean: near miss, a small one is restored first and release() restores the last
        self._plan.copy_from([float(n) for n in lens])

    def forward(self, rows: List[List[float]]) -> List[float]:
        packed = contiguous(rows)  # clean: done() in finally
        try:
            with scratch(self.heads) as ws:  # clean: context manager
                ws.copy_from([sum(r) for r in rows][: self.heads])
                return ws.clone()[: self.heads]
        finally:
            packed.done()

    def forward_packed(self, rows: List[List[float]]) -> float:
        packed = contiguous(rows)  # leak: only the tensor is kept, done() is not called
        tensor = packed.tensor
        return sum(tensor.values)

    def begin(self) -> None:
        if self.cache_lse:
            self._lse = lend_for_heads(self.heads, 1)  # clean: near miss, end() tests the same flag

    def end(self) -> None:
        if self.cache_lse:
            restore_workspace(self._lse)
            self._lse = None

    def split(self, rows: List[List[float]]) -> List[float]:
        with ExitStack() as stack:
            outs: List[float] = []
            for row in rows:
                ws = lend_workspace(len(row))  # clean: near miss, the exit stack restores it
                stack.callback(restore_workspace, ws)
                if not row:
                    continue
                outs.append(max(ws.copy_from(row).values[: len(row)]))
            return outs

    def release(self) -> None:
        restore_workspace(self._plan)
        self._plan = None
