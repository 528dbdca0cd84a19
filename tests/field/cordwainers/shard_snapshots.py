"""Retrieval shards: immutable snapshots with reference counts, swapped while searches are running."""
from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable

import torch

log = logging.getLogger("retrieval")


@dataclass(eq=False)
class Snapshot:
    version: int
    vectors: torch.Tensor
    ids: list[int]
    refs: int = 1
    retired: bool = False

    def topk(self, q: torch.Tensor, k: int) -> list[tuple[float, int]]:
        scores = self.vectors @ q
        vals, idx = scores.topk(min(k, len(self.ids)))
        return [(float(v), self.ids[int(i)]) for v, i in zip(vals, idx)]


class ShardRegistry:
    """`grab` adds a reference on the current snapshot, `let_go` takes it off."""

    def __init__(self) -> None:
        self._current: dict[str, Snapshot] = {}
        self._lock = threading.Lock()
        self.freed: Counter[str] = Counter()

    def install(self, shard: str, snap: Snapshot) -> None:
        with self._lock:
            old = self._current.get(shard)
            self._current[shard] = snap
        if old is not None:
            old.retired = True
            self.let_go(old)

    def grab(self, shard: str) -> Snapshot:
        with self._lock:
            snap = self._current[shard]
            snap.refs += 1
            return snap

    def grab_if(self, shard: str, version: int) -> Snapshot | None:
        snap = self.grab(shard)  # clean: near miss, let go when the version differs, else handed on
        if snap.version != version:
            self.let_go(snap)
            return None
        return snap

    def let_go(self, snap: Snapshot) -> None:
        with self._lock:
            snap.refs -= 1
            if snap.refs == 0:
                snap.vectors = torch.empty(0)
                self.freed[str(snap.version)] += 1

    def shards(self) -> list[str]:
        return list(self._current)


class Cursor:
    """Pages through one shard; holds its snapshot until `close`."""

    def __init__(self, reg: ShardRegistry, shard: str, page: int) -> None:
        self.reg = reg
        self.snap: Snapshot | None = reg.grab(shard)  # clean: close lets it go
        self.page = page
        self.at = 0

    def fetch(self) -> list[int]:
        if self.snap is None:
            return []
        out = self.snap.ids[self.at : self.at + self.page]
        self.at += len(out)
        return out

    def refresh(self, shard: str) -> None:
        if self.snap is not None:
            self.reg.let_go(self.snap)
        self.snap = self.reg.grab(shard)  # clean: near miss, the old one was let go, close ends this one
        self.at = 0

    def close(self) -> None:
        if self.snap is not None:
            self.reg.let_go(self.snap)
            self.snap = None


class Tail:
    """Follows a shard for the change feed."""

    def __init__(self, reg: ShardRegistry, shard: str) -> None:
        self.reg = reg
        self.shard = shard
        self.snap: Snapshot | None = None

    def poll(self) -> list[int]:
        fresh = self.reg.grab(self.shard)  # leak: an unchanged version returns with the extra reference
        if self.snap is not None and fresh.version == self.snap.version:
            return []
        known = set(self.snap.ids) if self.snap is not None else set()
        if self.snap is not None:
            self.reg.let_go(self.snap)
        self.snap = fresh
        return [i for i in fresh.ids if i not in known]

    def stop(self) -> None:
        if self.snap is not None:
            self.reg.let_go(self.snap)
            self.snap = None


class Searcher:
    def __init__(self, reg: ShardRegistry, workers: int) -> None:
        self.reg = reg
        self.pool = ThreadPoolExecutor(workers)

    def _search(self, snap: Snapshot, q: torch.Tensor, k: int) -> list[tuple[float, int]]:
        try:
            return snap.topk(q, k)
        finally:
            self.reg.let_go(snap)

    def search(self, q: torch.Tensor, k: int) -> list[tuple[float, int]]:
        futs: list[Future] = []
        for shard in self.reg.shards():
            snap = self.reg.grab(shard)  # clean: near miss, the task lets it go
            futs.append(self.pool.submit(self._search, snap, q, k))
        merged = [hit for f in futs for hit in f.result()]
        return sorted(merged, reverse=True)[:k]

    def search_min(self, q: torch.Tensor, k: int, min_rows: int) -> list[tuple[float, int]]:
        futs: list[Future] = []
        for shard in self.reg.shards():
            snap = self.reg.grab(shard)  # leak: shards with too few rows are skipped with their reference
            if len(snap.ids) < min_rows:
                log.debug("shard %s skipped", shard)
                continue
            futs.append(self.pool.submit(self._search, snap, q, k))
        merged = [hit for f in futs for hit in f.result()]
        return sorted(merged, reverse=True)[:k]

    def search_cb(self, shard: str, q: torch.Tensor, k: int, then: Callable[[list], None]) -> None:
        snap = self.reg.grab(shard)  # clean: near miss, the done callback lets it go
        fut = self.pool.submit(snap.topk, q, k)
        fut.add_done_callback(lambda f: (then(f.result()), self.reg.let_go(snap)))

    def pinned_version(self, shard: str, version: int, q: torch.Tensor) -> list[tuple[float, int]]:
        snap = self.reg.grab_if(shard, version)  # clean: let go before the return
        if snap is None:
            return []
        hits = snap.topk(q, 10)
        self.reg.let_go(snap)
        return hits

    def consistent(self, versions: dict[str, int]) -> bool:
        """Are all shards at the given versions?"""
        for shard, version in versions.items():
            if self.reg.grab_if(shard, version) is None:  # leak: a match is a reference nobody keeps
                return False
        return True

    def rows(self) -> int:
        total = 0
        for shard in self.reg.shards():
            cur = Cursor(self.reg, shard, 1000)  # clean: closed after its pages
            while page := cur.fetch():
                total += len(page)
            cur.close()
        return total

    def contains(self, shard: str, doc: int) -> bool:
        cur = Cursor(self.reg, shard, 1000)  # leak: a hit returns without closing the cursor
        while page := cur.fetch():
            if doc in page:
                return True
        cur.close()
        return False


def load_snapshot(folder: str, version: int) -> Snapshot | None:
    meta_f = open(os.path.join(folder, "meta.json"))  # clean: closed right after the parse
    meta = json.load(meta_f)
    meta_f.close()
    vec_f = open(os.path.join(folder, f"vectors.{version}.bin"), "rb")  # leak: dimension mismatch returns
    raw = vec_f.read()
    if len(raw) != 4 * meta["dim"] * len(meta["ids"]):
        log.error("shard %s: %d bytes", folder, len(raw))
        return None
    vec_f.close()
    vectors = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, meta["dim"])
    return Snapshot(version, vectors, meta["ids"])


def newest(reg: ShardRegistry, shards: list[str]) -> Snapshot | None:
    """The newest of several; the caller lets it go."""
    best: Snapshot | None = None
    for shard in shards:
        snap = reg.grab(shard)  # leak: the one it beats is overwritten, an older one falls out of the round
        if best is None or snap.version > best.version:
            best = snap
    return best


def newest_kept(reg: ShardRegistry, shards: list[str]) -> Snapshot | None:
    best: Snapshot | None = None
    for shard in shards:
        snap = reg.grab(shard)  # clean: near miss, the loser of each round is let go
        if best is None:
            best = snap
        elif snap.version > best.version:
            reg.let_go(best)
            best = snap
        else:
            reg.let_go(snap)
    return best
