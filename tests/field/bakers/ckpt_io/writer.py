"""Asynchronous checkpoint writer: stage on the training thread, write on another."""
from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from typing import Dict, List, Optional, Tuple

from .staging import StagingArea, StagingBlock

log = logging.getLogger("ckpt.writer")

Job = Tuple[str, StagingBlock]


class CheckpointWriter:
    def __init__(self, area: StagingArea, root: str) -> None:
        self.area = area
        self.root = root
        self.digests: Dict[str, str] = {}
        self._jobs: "queue.Queue[Optional[Job]]" = queue.Queue()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            name, block = job
            try:
                self._write(name, block)
            except OSError as exc:
                log.error("writing %s: %s", name, exc)
            finally:
                self.area.hand_in(block)

    def _write(self, name: str, block: StagingBlock) -> None:
        path = os.path.join(self.root, name)
        f = open(path + ".tmp", "wb")  # clean: near miss, closed in finally though the loop survives the error
        try:
            f.write(block.payload())
        finally:
            f.close()
        os.replace(path + ".tmp", path)

    def save(self, name: str, data: bytes) -> None:
        block = self.area.rent()  # clean: near miss, queued, the writer thread hands it in
        block.put(data)
        self._jobs.put((name, block))

    def save_deduped(self, name: str, data: bytes) -> bool:
        block = self.area.rent()  # leak: an unchanged shard returns before it is queued
        block.put(data)
        digest = hashlib.sha1(block.payload()).hexdigest()
        if self.digests.get(name) == digest:
            return False
        self.digests[name] = digest
        self._jobs.put((name, block))
        return True

    def save_all(self, shards: Dict[str, bytes]) -> List[str]:
        """Stages every shard; those too large for a block are reported."""
        oversize = []
        for name, data in shards.items():
            block = self.area.rent()  # leak: the handler notes the shard and drops the block
            try:
                block.put(data)
            except BufferError:
                oversize.append(name)
                continue
            self._jobs.put((name, block))
        return oversize

    def save_all_or_inline(self, shards: Dict[str, bytes]) -> int:
        inline = 0
        for name, data in shards.items():
            block = self.area.rent_now()  # clean: near miss, None is written inline, oversize handed in, else queued
            if block is None:
                self._write_inline(name, data)
                inline += 1
                continue
            try:
                block.put(data)
            except BufferError:
                self.area.hand_in(block)
                self._write_inline(name, data)
                inline += 1
                continue
            self._jobs.put((name, block))
        return inline

    def _write_inline(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.root, name), "wb") as f:  # clean: with
            f.write(data)

    def write_manifest(self, names: List[str], fsync: bool) -> bool:
        f = open(os.path.join(self.root, "manifest"), "w")  # leak: the handler returns False with the file open
        try:
            for name in names:
                f.write(f"{name} {self.digests[name]}\n")
            if fsync:
                f.flush()
                os.fsync(f.fileno())
        except KeyError as exc:
            log.error("no digest for %s", exc)
            return False
        f.close()
        return True
