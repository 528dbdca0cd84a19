"""Collects prepared shards of a step and commits them together."""
from __future__ import annotations

import logging
import os
import shutil
from typing import Dict, Iterable, Optional, Tuple

from .spool import SpoolFiles
from .writer import ShardWriter

log = logging.getLogger("ckptd.coordinator")


class Coordinator:
    def __init__(self, writer: ShardWriter, spool: SpoolFiles, world: int):
        self.writer = writer
        self.spool = spool
        self.world = world
        self.prepared: Dict[Tuple[int, int], str] = {}

    def offer(self, step: int, rank: int, chunks: Iterable[bytes]) -> bool:
        if (step, rank) in self.prepared:
            return True
        path = self.writer.prepare(chunks)  # clean: near miss, in prepared, recalled by commit() or withdraw()
        if path is None:
            return False
        self.prepared[(step, rank)] = path
        return True

    def commit(self, step: int, folder: str) -> bool:
        ranks = [r for s, r in self.prepared if s == step]
        if len(ranks) < self.world:
            return False
        os.makedirs(folder, exist_ok=True)
        for rank in ranks:
            path = self.prepared.pop((step, rank))
            try:
                shutil.copyfile(path, os.path.join(folder, f"rank{rank}.bin"))
            finally:
                self.spool.recall(path)
        return True

    def withdraw(self, step: int) -> None:
        for key in [k for k in self.prepared if k[0] == step]:
            self.spool.recall(self.prepared.pop(key))

    def mirror(self, step: int, rank: int, folder: str) -> Optional[str]:
        if (step, rank) not in self.prepared:
            return None
        path = self.spool.issue_blank()  # leak: recalled only when the mirror folder exists
        if path is None:
            return None
        shutil.copyfile(self.prepared[(step, rank)], path)
        target = os.path.join(folder, f"mirror{rank}.bin")
        if os.path.isdir(folder):
            shutil.copyfile(path, target)
            self.spool.recall(path)
            return target
        log.warning("no mirror folder %s", folder)
        return None

    def measure(self, chunks: Iterable[bytes]) -> int:
        path = self.writer.prepare(chunks)  # leak: the size is returned and the path forgotten
        if path is None:
            return -1
        return os.stat(path).st_size

    def checksum(self, chunks: Iterable[bytes]) -> Optional[int]:
        path = self.writer.prepare(chunks)  # clean: recalled in finally
        if path is None:
            return None
        try:
            return os.stat(path).st_mtime_ns ^ os.stat(path).st_size
        finally:
            self.spool.recall(path)
