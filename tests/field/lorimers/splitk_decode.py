"""Split-K (flash-decoding) driver: partial outputs live in a bucketed workspace pool."""
from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import DefaultDict, Dict, List, Optional, Tuple

import numpy as np

try:
    import torch  # noqa: F401
except ImportError:
    torch = None


def _bucket(n: int) -> int:
    return 1 << max(6, math.ceil(math.log2(max(n, 1))))


class WorkspacePool:
    def __init__(self, limit_bytes: int = 1 << 26) -> None:
        self._free: DefaultDict[int, List[np.ndarray]] = defaultdict(list)
        self.limit_bytes = limit_bytes
        self.in_use_bytes = 0

    def acquire(self, nelem: int) -> np.ndarray:
        size = _bucket(nelem)
        if self.in_use_bytes + size * 4 > self.limit_bytes:
            raise MemoryError("workspace limit")
        bucket = self._free[size]
        ws = bucket.pop() if bucket else np.empty(size, np.float32)
        self.in_use_bytes += ws.nbytes
        return ws

    def release(self, ws: np.ndarray) -> None:
        self.in_use_bytes -= ws.nbytes
        self._free[ws.size].append(ws)


@dataclass
class DecodePlan:
    num_splits: int
    need_lse: bool = False
    skip_empty: bool = True


def plan_splits(seq_len: int, sm_count: int = 132, chunk: int = 16) -> DecodePlan:
    return DecodePlan(num_splits=max(1, min(sm_count // 8, -(-seq_len // chunk))))


class SplitKDecoder:
    def __init__(self, pool: WorkspacePool, head_dim: int) -> None:
        self.pool = pool
        self.head_dim = head_dim
        self._scratch: Dict[int, np.ndarray] = {}
        self._grow: Dict[int, np.ndarray] = {}

    # -- partials ---------------------------------------------------------
    def _partial(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Unnormalised output of one split; last element of the row is the row sum."""
        ws = self.pool.acquire(self.head_dim + 1)  # clean: returned to the caller
        p = np.exp(k @ q)
        ws[: self.head_dim] = p @ v
        ws[self.head_dim] = p.sum()
        return ws

    def _reduce(self, parts: List[np.ndarray]) -> np.ndarray:
        d = self.head_dim
        total = np.zeros(d + 1, np.float32)
        while parts:
            ws = parts.pop()
            total += ws[: d + 1]
            self.pool.release(ws)
        return total[:d] / total[d]

    def decode(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: DecodePlan) -> np.ndarray:
        parts: List[np.ndarray] = []
        for ks, vs in zip(np.array_split(k, plan.num_splits), np.array_split(v, plan.num_splits)):
            parts.append(self._partial(q, ks, vs))  # clean: near miss, _reduce empties the list and releases each
        return self._reduce(parts)

    def decode_windowed(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, plan: DecodePlan, window: int) -> np.ndarray:
        parts: List[np.ndarray] = []
        for ks, vs in zip(np.array_split(k, plan.num_splits), np.array_split(v, plan.num_splits)):
            parts.append(self._partial(q, ks, vs))  # leak: the short-window return drops the list
        if window < plan.num_splits:
            return v[-1].copy()
        return self._reduce(parts)

    def decode_single(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        ws = self._partial(q, k, v)  # leak: copied out and dropped
        out = ws[: self.head_dim].copy()
        out /= ws[self.head_dim]
        return out

    def decode_single_fp16(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        ws = self._partial(q, k, v)  # clean: copied out, then released
        out = (ws[: self.head_dim] / ws[self.head_dim]).astype(np.float16)
        self.pool.release(ws)
        return out

    def row_sums(self, q: np.ndarray, chunks: List[Tuple[np.ndarray, np.ndarray]]) -> List[float]:
        return [float(self._partial(q, k, v)[self.head_dim]) for k, v in chunks]  # leak: only the scalar is kept

    # -- scratch kept per head count ---------------------------------------
    def scratch(self, heads: int, nelem: int) -> np.ndarray:
        ws = self._scratch.get(heads)
        if ws is None or ws.size < nelem:
            ws = self.pool.acquire(nelem)  # leak: on growth the smaller entry is overwritten unreleased
            self._scratch[heads] = ws
        return ws[:nelem]

    def growing(self, heads: int, nelem: int) -> np.ndarray:
        ws = self._grow.get(heads)
        if ws is not None and ws.size < nelem:
            self.pool.release(self._grow.pop(heads))
            ws = None
        if ws is None:
            ws = self._grow[heads] = self.pool.acquire(nelem)  # clean: near miss, the smaller entry was popped and released first
        return ws[:nelem]

    def close(self) -> None:
        for table in (self._scratch, self._grow):
            for ws in table.values():
                self.pool.release(ws)
            table.clear()

    # -- output ownership ---------------------------------------------------
    def attend_into(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: Optional[np.ndarray] = None) -> float:
        owned = out is None
        if owned:
            out = self.pool.acquire(self.head_dim)  # clean: near miss, released under the same flag
        try:
            p = np.exp(k @ q)
            out[: self.head_dim] = p @ v / p.sum()
            return float(np.abs(out[: self.head_dim]).max())
        finally:
            if owned:
                self.pool.release(out)

    def attend_lse(self, q: np.ndarray, k: np.ndarray, plan: DecodePlan) -> float:
        lse = self.pool.acquire(plan.num_splits) if plan.need_lse else None  # leak: with one split the release is skipped
        parts = [float(np.logaddexp.reduce(c @ q)) for c in np.array_split(k, plan.num_splits)]
        if plan.need_lse:
            lse[: len(parts)] = parts
        total = float(np.logaddexp.reduce(parts))
        if plan.need_lse and plan.num_splits > 1:
            self.pool.release(lse)
        return total

    def attend_max(self, q: np.ndarray, k: np.ndarray, plan: DecodePlan) -> float:
        tmp = self.pool.acquire(k.shape[0]) if plan.need_lse else None  # clean: near miss, both guards ask plan.need_lse
        best = float((k @ q).max())
        if plan.need_lse:
            tmp[: k.shape[0]] = k @ q
            self.pool.release(tmp)
        return best


def autotune_splits(dec: SplitKDecoder, q: np.ndarray, k: np.ndarray, v: np.ndarray, candidates: List[int]) -> int:
    """First candidate whose workspace fits wins."""
    for n in candidates:
        try:
            probe = dec.pool.acquire(n * dec.head_dim)  # leak: the accepted candidate returns with the probe held
        except MemoryError:
            continue
        if n <= k.shape[0]:
            return n
        dec.pool.release(probe)
    return 1


def main() -> None:
    pool = WorkspacePool()
    dec = SplitKDecoder(pool, 8)
    q, k, v = (np.full(s, 0.1, np.float32) for s in ((8,), (64, 8), (64, 8)))
    plan = plan_splits(64)
    dec.decode(q, k, v, plan)
    dec.decode_single_fp16(q, k, v)
    dec.attend_into(q, k, v)
    dec.growing(2, 100), dec.growing(2, 1000)
    dec.attend_max(q, k, DecodePlan(2, need_lse=True))
    dec.close()
    print("bytes", pool.in_use_bytes)
    dec.decode_windowed(q, k, v, plan, 1)
    dec.decode_single(q, k, v)
    dec.scratch(2, 100), dec.scratch(2, 1000)
    dec.row_sums(q, [(k, v)])
    dec.attend_lse(q, k, DecodePlan(1, need_lse=True))
    autotune_splits(dec, q, k, v, [128, 8])
    dec.close()
    print("bytes", pool.in_use_bytes)


if __name__ == "__main__":
    main()
