"""Background checkpoint uploader: pins host copies, writes shards, uploads parts."""
from __future__ import annotations

import hashlib
import io
import logging
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import Dict, List, Optional

import torch

logger = logging.getLogger(__name__)


class HostArena:
    """Bytes are granted against a budget; a grant must be given up again."""

    def __init__(self, budget: int):
        self.budget = budget
        self.granted: Dict[int, int] = {}
        self._ids = 0
        self._mu = threading.Lock()

    def grant(self, nbytes: int) -> Optional[int]:
        with self._mu:
            if sum(self.granted.values()) + nbytes > self.budget:
                return None
            self._ids += 1
            self.granted[self._ids] = nbytes
            return self._ids

    def give_up(self, gid: int) -> None:
        with self._mu:
            self.granted.pop(gid)


@dataclass
class Shard:
    name: str
    tensors: Dict[str, torch.Tensor]
    grant: Optional[int] = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


@dataclass
class Stats:
    uploaded: int = 0
    failed: List[str] = field(default_factory=list)


class Uploader:
    def __init__(self, arena: HostArena, root: str, workers: int = 2):
        self.arena = arena
        self.root = root
        self.q: "queue.Queue[Optional[Shard]]" = queue.Queue()
        self.stats = Stats()
        self._threads = [threading.Thread(target=self._worker, daemon=True) for _ in range(workers)]
        for t in self._threads:
            t.start()

    def enqueue(self, shard: Shard) -> bool:
        gid = self.arena.grant(shard.nbytes)  # clean: rides in the shard, the worker gives it up
        if gid is None:
            return False
        shard.grant = gid
        self.q.put(shard)
        return True

    def enqueue_new(self, shard: Shard) -> bool:
        gid = self.arena.grant(shard.nbytes)  # leak: a shard already on disk returns without giving up the grant
        if gid is None:
            return False
        if os.path.exists(self._path(shard)):
            logger.info("%s already there", shard.name)
            return True
        shard.grant = gid
        self.q.put(shard)
        return True

    def _worker(self) -> None:
        while True:
            shard = self.q.get()
            if shard is None:
                return
            try:
                self._write(shard)
                self.stats.uploaded += 1
            except OSError as exc:
                logger.error("%s: %s", shard.name, exc)
                self.stats.failed.append(shard.name)
            finally:
                if shard.grant is not None:
                    self.arena.give_up(shard.grant)
                    shard.grant = None

    def _path(self, shard: Shard) -> str:
        return os.path.join(self.root, shard.name + ".pt")

    def _write(self, shard: Shard) -> None:
        tmp = self._path(shard) + ".tmp"
        with open(tmp, "wb") as fh:  # clean: with statement
            torch.save(shard.tensors, fh)
        os.replace(tmp, self._path(shard))

    def write_sync(self, shard: Shard) -> bool:
        gid = self.arena.grant(shard.nbytes)  # leak: the OSError handler returns and forgets the grant
        if gid is None:
            return False
        try:
            self._write(shard)
        except OSError:
            logger.exception("sync write")
            return False
        self.arena.give_up(gid)
        return True

    def write_or_degrade(self, shard: Shard) -> bool:
        gid = self.arena.grant(shard.nbytes)  # clean: near miss, ungranted writes go on but have nothing to give up
        if gid is None:
            logger.warning("no budget, writing unpinned")
        self._write(shard)
        if gid is not None:
            self.arena.give_up(gid)
        return gid is not None

    def close(self) -> None:
        for _ in self._threads:
            self.q.put(None)
        for t in self._threads:
            t.join()


def digest(path: str, limit: int) -> Optional[str]:
    fh = open(path, "rb")  # leak: files over the limit return with the handle open
    h = hashlib.sha256()
    seen = 0
    for chunk in iter(lambda: fh.read(1 << 20), b""):
        seen += len(chunk)
        if seen > limit:
            return None
        h.update(chunk)
    fh.close()
    return h.hexdigest()


def open_parts(paths: List[str]) -> List[io.BufferedReader]:
    opened: List[io.BufferedReader] = []
    for p in paths:
        if not os.path.exists(p):
            for fh in opened:
                fh.close()
            return []
        opened.append(open(p, "rb"))  # clean: near miss, a missing part closes all the earlier ones
    return opened


def total_size(paths: List[str]) -> int:
    n = 0
    for fh in open_parts(paths):  # clean: each handle is closed in the loop
        n += fh.seek(0, io.SEEK_END)
        fh.close()
    return n


def magic(paths: List[str]) -> Optional[bytes]:
    parts = open_parts(paths)  # leak: only the first part is closed
    if not parts:
        return None
    head = parts[0].read(8)
    parts[0].close()
    return head


def budgeted_copy(arena: HostArena, tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    grants: List[int] = []
    out: List[torch.Tensor] = []
    for t in tensors:
        gid = arena.grant(t.nbytes)  # leak: a refusal returns the copies so far and keeps their grants
        if gid is None:
            return out
        grants.append(gid)
        out.append(t.clone())
    for gid in grants:
        arena.give_up(gid)
    return out
