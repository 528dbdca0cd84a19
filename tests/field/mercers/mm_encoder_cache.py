"""Multimodal inputs: image files, encoder budget, cached embeddings."""
from __future__ import annotations

import hashlib
import io
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Grant:
    units: int
    note: str = ""


class EncoderBudget:
    """Encoder tokens which may be computed or cached at one time."""

    def __init__(self, units: int) -> None:
        self.free = units
        self._mu = threading.Lock()

    def request(self, units: int, note: str = "") -> Optional[Grant]:
        with self._mu:
            if units > self.free:
                return None
            self.free -= units
            return Grant(units, note)

    def hand_back(self, g: Grant) -> None:
        with self._mu:
            self.free += g.units
            g.units = 0


@dataclass(eq=False)
class Embedding:
    digest: str
    rows: List[List[float]]
    grant: Grant
    users: int = 0


class EmbeddingCache:
    def __init__(self, budget: EncoderBudget) -> None:
        self.budget = budget
        self._items: Dict[str, Embedding] = {}

    def hold(self, digest: str) -> Optional[Embedding]:
        emb = self._items.get(digest)
        if emb is not None:
            emb.users += 1
        return emb

    def let_go(self, emb: Embedding) -> None:
        emb.users -= 1

    def add(self, digest: str, rows: List[List[float]], grant: Grant) -> Embedding:
        """Takes over the grant. The returned embedding is held for the caller."""
        emb = Embedding(digest, rows, grant, users=1)
        self._items[digest] = emb
        return emb

    def sweep(self) -> int:
        gone = [d for d, e in self._items.items() if e.users == 0]
        for d in gone:
            emb = self._items.pop(d)
            self.budget.hand_back(emb.grant)
        return len(gone)


@dataclass
class MMRequest:
    rid: str
    images: List[Path] = field(default_factory=list)
    held: List[Embedding] = field(default_factory=list)
    reserve: Optional[Grant] = None


def sniff(path: Path) -> str:
    fh = open(path, "rb")  # leak: PNG and JPEG return before the close
    magic = fh.read(8)
    if magic.startswith(b"\x89PNG"):
        return "png"
    if magic.startswith(b"\xff\xd8"):
        return "jpeg"
    fh.close()
    return "raw"


def digest_of(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as fh:  # clean: closed by with
        for chunk in iter(lambda: fh.read(1 << 20), b""):
            h.update(chunk)
    return h.hexdigest()


def open_image(path: Path) -> io.BufferedReader:
    fh = open(path, "rb")  # clean: handed to the caller
    fh.seek(0)
    return fh


def frames(path: Path, size: int) -> Iterator[bytes]:
    with open_image(path) as fh:  # clean: near miss, the file is its own context manager
        while True:
            block = fh.read(size)
            if not block:
                return
            yield block


class MMScheduler:
    def __init__(self, budget: EncoderBudget, cache: EmbeddingCache, patch: int = 14) -> None:
        self.budget = budget
        self.cache = cache
        self.patch = patch
        self.requests: Dict[str, MMRequest] = {}

    def _cost(self, path: Path) -> int:
        return max(1, path.stat().st_size // (self.patch * self.patch * 3))

    def _encode(self, path: Path, units: int) -> List[List[float]]:
        data = open_image(path)  # clean: closed after the read
        raw = data.read()
        data.close()
        return [[float(b)] for b in raw[:units]]

    def _reuse(self, req: MMRequest, digest: str) -> bool:
        emb = self.cache.hold(digest)  # clean: in req.held, let go by finish and cancel
        if emb is None:
            return False
        req.held.append(emb)
        return True

    def encode_one(self, req: MMRequest, path: Path) -> bool:
        digest = digest_of(path)
        if self._reuse(req, digest):
            return True
        units = self._cost(path)
        g = self.budget.request(units, req.rid)  # clean: near miss, the cache takes it over, sweep ends it
        if g is None:
            return False
        rows = self._encode(path, units)
        req.held.append(self.cache.add(digest, rows, g))  # clean: in req.held, let go by finish
        return True

    def encode_all(self, req: MMRequest) -> int:
        n = 0
        for path in req.images:
            if not self.encode_one(req, path):
                break
            n += 1
        return n

    def encode_if_small(self, req: MMRequest, path: Path, limit: int) -> bool:
        digest = digest_of(path)
        if self._reuse(req, digest):
            return True
        units = self._cost(path)
        g = self.budget.request(units, req.rid)  # leak: an image over the limit returns with the grant
        if g is None:
            return False
        if units > limit:
            _log.info("%s is too large for the fast path", path)
            return False
        rows = self._encode(path, units)
        req.held.append(self.cache.add(digest, rows, g))  # clean: in req.held, let go by finish
        return True

    def is_cached(self, path: Path) -> bool:
        emb = self.cache.hold(digest_of(path))  # leak: held to look and never let go
        return emb is not None

    def cached_rows(self, path: Path) -> int:
        emb = self.cache.hold(digest_of(path))  # clean: let go when there is one
        if emb is None:
            return 0
        n = len(emb.rows)
        self.cache.let_go(emb)
        return n

    def reserve(self, req: MMRequest, units: int) -> bool:
        if req.reserve is not None:
            return True
        req.reserve = self.budget.request(units, req.rid)  # leak: cancel drops the request with its reserve
        if req.reserve is None:
            return False
        self.requests[req.rid] = req
        return True

    def finish(self, req: MMRequest) -> None:
        self.requests.pop(req.rid, None)
        for emb in req.held:
            self.cache.let_go(emb)
        req.held.clear()
        if req.reserve is not None:
            self.budget.hand_back(req.reserve)
            req.reserve = None

    def cancel(self, rid: str) -> Optional[MMRequest]:
        req = self.requests.pop(rid, None)
        if req is None:
            return None
        for emb in req.held:
            self.cache.let_go(emb)
        req.held.clear()
        req.reserve = None
        return req


class BatchEncoder:
    """Encodes pictures in groups under one grant."""

    def __init__(self, sched: MMScheduler) -> None:
        self.sched = sched
        self.stats: Dict[str, Any] = {"groups": 0}

    def run(self, paths: List[Path], group_units: int) -> List[int]:
        sizes: List[int] = []
        g = self.sched.budget.request(group_units)  # clean: handed back after the loop, break included
        if g is None:
            return sizes
        spent = 0
        for p in paths:
            units = self.sched._cost(p)
            if spent + units > group_units:
                break
            sizes.append(len(self.sched._encode(p, units)))
            spent += units
        self.sched.budget.hand_back(g)
        self.stats["groups"] += 1
        return sizes
