"""Vector index with versioned read snapshots."""
import bisect
import logging
import threading
import time
from typing import Dict, Generator, List, NamedTuple, Optional, Sequence

import torch

logger = logging.getLogger("annindex")


class Hit(NamedTuple):
    doc: int
    score: float


class Version:
    def __init__(self, number: int, vectors: torch.Tensor, ids: List[int]):
        self.number = number
        self.vectors = vectors
        self.ids = ids
        self.readers = 0


class VersionedIndex:
    def __init__(self, dim: int):
        self.dim = dim
        self._guard = threading.RLock()
        self._versions: Dict[int, Version] = {0: Version(0, torch.empty(0, dim), [])}
        self._head = 0

    def open_snapshot(self, number: Optional[int] = None) -> Version:
        with self._guard:  # clean: with statement
            v = self._versions[self._head if number is None else number]
            v.readers += 1  # clean: the caller closes the snapshot
            return v

    def close_snapshot(self, v: Version) -> None:
        with self._guard:  # clean: with statement
            v.readers -= 1

    def publish(self, vectors: torch.Tensor, ids: List[int]) -> int:
        with self._guard:  # clean: with statement
            self._head += 1
            self._versions[self._head] = Version(self._head, vectors, ids)
            return self._head

    def vacuum(self) -> int:
        with self._guard:  # clean: with statement
            dead = [n for n, v in self._versions.items() if v.readers == 0 and n != self._head]
            for n in dead:
                del self._versions[n]
            return len(dead)


class Searcher:
    def __init__(self, index: VersionedIndex, metric: str = "ip"):
        self.index = index
        self.metric = metric
        self.cursor: Optional[Version] = None
        self.pinned: List[Version] = []

    def _scores(self, v: Version, q: torch.Tensor) -> torch.Tensor:
        if self.metric == "ip":
            return v.vectors @ q
        return -(v.vectors - q).norm(dim=1)

    def search(self, q: torch.Tensor, k: int) -> List[Hit]:
        v = self.index.open_snapshot()  # leak: an empty index returns no hits and an open snapshot
        if not v.ids:
            return []
        s, i = self._scores(v, q).topk(min(k, len(v.ids)))
        hits = [Hit(v.ids[j], x) for j, x in zip(i.tolist(), s.tolist())]
        self.index.close_snapshot(v)
        return hits

    def count(self) -> int:
        v = self.index.open_snapshot()  # clean: closed at once
        n = len(v.ids)
        self.index.close_snapshot(v)
        return n

    def has(self, doc: int) -> bool:
        v = self.index.open_snapshot()  # clean: near miss, the return sits in a try with finally
        try:
            pos = bisect.bisect_left(v.ids, doc)
            return pos < len(v.ids) and v.ids[pos] == doc
        finally:
            self.index.close_snapshot(v)

    def scan(self, batch: int) -> Generator[torch.Tensor, None, None]:
        v = self.index.open_snapshot()  # clean: near miss, finally closes it when the generator ends or is closed
        try:
            for i in range(0, len(v.ids), batch):
                yield v.vectors[i : i + batch]
        finally:
            self.index.close_snapshot(v)

    def scan_until(self, batch: int, deadline: float) -> Generator[torch.Tensor, None, None]:
        v = self.index.open_snapshot()  # leak: past the deadline it returns without closing
        for i in range(0, len(v.ids), batch):
            if time.monotonic() > deadline:
                logger.warning("scan stopped at %d of %d", i, len(v.ids))
                return
            yield v.vectors[i : i + batch]
        self.index.close_snapshot(v)

    def begin(self) -> None:
        if self.cursor is not None:
            self.index.close_snapshot(self.cursor)
        self.cursor = self.index.open_snapshot()  # clean: near miss, the former cursor is closed above, end() closes the last

    def advance(self) -> bool:
        """Move on to the newest version."""
        new = self.index.open_snapshot()  # leak: when the version is unchanged the second reader count stays
        if self.cursor is not None and new.number == self.cursor.number:
            return False
        self.end()
        self.cursor = new
        return True

    def end(self) -> None:
        if self.cursor is not None:
            self.index.close_snapshot(self.cursor)
            self.cursor = None

    def pin(self, numbers: Sequence[int]) -> int:
        for n in numbers:
            self.pinned.append(self.index.open_snapshot(n))  # clean: near miss, unpin_all closes each one
        return len(self.pinned)

    def unpin_all(self) -> None:
        while self.pinned:
            self.index.close_snapshot(self.pinned.pop())

    def diff(self, a: int, b: int) -> List[int]:
        va = self.index.open_snapshot(a)  # leak: the same version twice returns before both are closed
        vb = self.index.open_snapshot(b)  # leak: the same version twice returns before both are closed
        if va is vb:
            return []
        out = sorted(set(vb.ids) - set(va.ids))
        self.index.close_snapshot(va)
        self.index.close_snapshot(vb)
        return out

    def overlap(self, a: int, b: int) -> float:
        va = self.index.open_snapshot(a)  # clean: closed before the division
        vb = self.index.open_snapshot(b)  # clean: closed before the division
        inter, total = len(set(va.ids) & set(vb.ids)), len(va.ids)
        for v in (va, vb):
            self.index.close_snapshot(v)
        if total == 0:
            return 0.0
        return inter / total

    def centroid(self) -> Optional[torch.Tensor]:
        vectors = self.index.open_snapshot().vectors  # leak: only the vectors are kept, the snapshot cannot be closed
        return vectors.mean(0) if len(vectors) else None
