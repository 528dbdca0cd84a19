"""Online feature fetch for the ranking models.

Rows are gathered into tensors that are cached by (shape, dtype); a request may hold at
most `max_inflight` of them. Two row sources: the local arena and the remote KV tier.
"""
from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from typing import Dict, List, Optional, Sequence, Tuple

import torch

log = logging.getLogger(__name__)

Shape = Tuple[int, ...]


class ScratchTensors:
    """Free tensors by shape; `get` makes a new one if the bin is empty."""

    def __init__(self, device: str = "cpu", cap_bytes: int = 1 << 30):
        self.device = device
        self.cap_bytes = cap_bytes
        self.out_bytes = 0
        self._bins: Dict[Tuple[Shape, torch.dtype], List[torch.Tensor]] = collections.defaultdict(list)
        self._mu = threading.Lock()

    def get(self, *shape: int, dtype: torch.dtype = torch.float32) -> Optional[torch.Tensor]:
        with self._mu:
            bin_ = self._bins[(shape, dtype)]
            t = bin_.pop() if bin_ else torch.empty(shape, dtype=dtype, device=self.device)  # clean: near miss, put back in the bin when over the cap
            n = t.numel() * t.element_size()
            if self.out_bytes + n > self.cap_bytes:
                bin_.append(t)
                return None
            self.out_bytes += n
            return t

    def put(self, t: torch.Tensor) -> None:
        with self._mu:
            self.out_bytes -= t.numel() * t.element_size()
            self._bins[(tuple(t.shape), t.dtype)].append(t)


class RowTable:
    """Device rows of hot entities, one row per entity; a row is leased until evicted."""

    def __init__(self, rows: int, dim: int):
        self.data = torch.zeros(rows, dim)
        self._used = bytearray(rows)
        self._where: Dict[str, int] = {}

    def grab_row(self) -> int:
        i = self._used.find(0)
        if i >= 0:
            self._used[i] = 1
        return i

    def free_row(self, i: int) -> None:
        self._used[i] = 0

    def install(self, entity: str, values: Optional[torch.Tensor]) -> bool:
        row = self.grab_row()  # leak: not freed when the values are missing
        if row < 0:
            return False
        if values is None:
            log.debug("no values for %s", entity)
            return False
        self.data[row].copy_(values)
        stale = self._where.get(entity)
        if stale is not None:
            self.free_row(stale)
        self._where[entity] = row
        return True

    def refresh(self, entity: str, values: torch.Tensor) -> None:
        row = self._where.get(entity, -1)
        if row < 0:
            row = self.grab_row()  # clean: _where holds it until evict
            if row < 0:
                return
            self._where[entity] = row
        self.data[row].copy_(values)

    def rename(self, old: str, new: str) -> None:
        row = self.grab_row()  # leak: not freed when `old` is unknown
        if row < 0:
            return
        src = self._where.pop(old, None)
        if src is None:
            return
        self.evict(new)
        self.data[row].copy_(self.data[src])
        self.free_row(src)
        self._where[new] = row

    def evict(self, entity: str) -> None:
        row = self._where.pop(entity, -1)
        if row >= 0:
            self.free_row(row)

    def lookup(self, entity: str) -> Optional[torch.Tensor]:
        row = self._where.get(entity, -1)
        return self.data[row] if row >= 0 else None


@dataclasses.dataclass
class FetchResult:
    values: torch.Tensor
    missing: List[str]
    pooled: bool


class FeatureStore:
    def __init__(self, scratch: ScratchTensors, table: RowTable, remote, dim: int, max_inflight: int = 64):
        self.scratch = scratch
        self.table = table
        self.remote = remote
        self.dim = dim
        self._inflight = threading.Semaphore(max_inflight)

    # The result's tensor is the caller's to hand back with `finish`.
    def fetch(self, entities: Sequence[str]) -> Optional[FetchResult]:
        if not self._inflight.acquire(timeout=0.05):  # leak: kept when the scratch pool is over its cap
            return None
        out = self.scratch.get(len(entities), self.dim)  # clean: handed to the caller in FetchResult
        if out is None:
            return None
        missing = []
        for i, e in enumerate(entities):
            row = self.table.lookup(e)
            if row is None:
                out[i].zero_()
                missing.append(e)
            else:
                out[i].copy_(row)
        return FetchResult(out, missing, pooled=True)

    def fetch_static(self, values: torch.Tensor) -> FetchResult:
        return FetchResult(values, [], pooled=False)

    def finish(self, res: FetchResult) -> None:
        if res.pooled:
            self.scratch.put(res.values)
            self._inflight.release()

    # ------------------------------------------------------------------
    def _embed_text(self, hashes: torch.Tensor) -> torch.Tensor:
        out = self.scratch.get(hashes.shape[0], self.dim)  # clean: handed to the caller
        if out is None:
            raise MemoryError("scratch cap")
        torch.index_select(self.table.data, 0, hashes % self.table.data.shape[0], out=out)
        return out

    def text_features(self, hashes: torch.Tensor) -> torch.Tensor:
        return self._embed_text(hashes).clone()  # leak: the pooled tensor is cloned and dropped

    def user_vector(self, user: str, default: Optional[torch.Tensor] = None) -> torch.Tensor:
        if default is not None:
            res = self.fetch_static(default)
        else:
            res = self.fetch([user])  # clean: near miss, finish skips only the results that were never pooled
            if res is None:
                return torch.zeros(self.dim)
        vec = res.values.reshape(-1, self.dim)[0].clone()
        self.finish(res)
        return vec

    def backfill(self, entities: Sequence[str]) -> int:
        res = self.fetch(entities)  # leak: a fetch with nothing missing returns without finish
        if res is None:
            return 0
        if not res.missing:
            return 0
        got = self.remote.multi_get(res.missing)
        for e, v in zip(res.missing, got):
            if v is not None:
                self.table.refresh(e, v)
        self.finish(res)
        return len(got)

    def windowed(self, x: torch.Tensor, windows: Sequence[int]) -> List[torch.Tensor]:
        outs = []
        acc = self.scratch.get(1, x.shape[1])  # clean: put back at the end
        if acc is None:
            return outs
        for w in windows:
            tmp = self.scratch.get(w, x.shape[1])  # leak: a window longer than the input goes on without put
            if tmp is None:
                break
            if w > x.shape[0]:
                continue
            tmp.copy_(x[-w:])
            torch.sum(tmp, dim=0, keepdim=True, out=acc)
            outs.append(acc[0].clone())
            self.scratch.put(tmp)
        self.scratch.put(acc)
        return outs
