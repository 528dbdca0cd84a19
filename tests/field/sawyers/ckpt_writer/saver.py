"""Asynchronous checkpoint saver."""
from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterable, Mapping, Optional

from .files import Manifest, ShardFile
from .staging import Slab, StagingArena

logger = logging.getLogger(__name__)


class AsyncSaver:
    def __init__(self, root: str, arena: StagingArena, workers: int = 2) -> None:
        self.root = root
        self.arena = arena
        self.manifest = Manifest(root)
        self._exec = ThreadPoolExecutor(workers)
        self._jobs: list[tuple[Future[int], Slab]] = []
        self._uploads: dict[str, Slab] = {}

    def _fill(self, payload: bytes) -> Optional[Slab]:
        slab = self.arena.obtain(1.0)  # clean: filled and handed to the caller
        if slab is not None:
            slab.view[: len(payload)] = payload
            slab.filled = len(payload)
        return slab

    def save_shard(self, name: str, payloads: Iterable[bytes]) -> int:
        shard = ShardFile(os.path.join(self.root, name))
        shard.open()  # clean: committed or discarded
        for payload in payloads:
            slab = self._fill(payload)  # clean: recycled after the write
            if slab is None:
                shard.discard()
                return 0
            shard.write(slab)
            self.arena.recycle(slab)
        shard.commit()
        return shard.written

    def save_small(self, name: str, payload: bytes) -> int:
        shard = ShardFile(os.path.join(self.root, name)).open()  # leak: neither committed nor discarded without a slab
        slab = self._fill(payload)  # clean: recycled after the commit
        if slab is None:
            logger.warning("no staging slab for %s", name)
            return 0
        shard.write(slab)
        shard.commit()
        self.arena.recycle(slab)
        return shard.written

    def submit(self, payload: bytes, sink: Callable[[Slab], int]) -> bool:
        slab = self._fill(payload)  # clean: the done callback recycles it
        if slab is None:
            return False
        fut = self._exec.submit(sink, slab)
        fut.add_done_callback(lambda _f: self.arena.recycle(slab))
        return True

    def submit_checked(self, payload: bytes, sink: Callable[[Slab], int]) -> bool:
        slab = self._fill(payload)  # leak: the callback recycles only after a success
        if slab is None:
            return False

        def _done(fut: "Future[int]") -> None:
            if fut.exception() is not None:
                logger.error("sink failed: %s", fut.exception())
                return
            self.arena.recycle(slab)

        self._exec.submit(sink, slab).add_done_callback(_done)
        return True

    def submit_tracked(self, payload: bytes, sink: Callable[[Slab], int]) -> bool:
        slab = self._fill(payload)  # clean: wait() walks the jobs and recycles each
        if slab is None:
            return False
        self._jobs.append((self._exec.submit(sink, slab), slab))
        return True

    def wait(self) -> int:
        total = 0
        for fut, slab in self._jobs:
            try:
                total += fut.result()
            except OSError as exc:
                logger.error("shard write failed: %s", exc)
            self.arena.recycle(slab)
        self._jobs.clear()
        return total

    def begin_upload(self, key: str, payload: bytes) -> bool:
        slab = self._fill(payload)  # leak: cancel_upload() pops the entry and drops the slab
        if slab is None or key in self._uploads:
            if slab is not None:
                self.arena.recycle(slab)
            return False
        self._uploads[key] = slab
        return True

    def end_upload(self, key: str) -> int:
        slab = self._uploads.pop(key)
        size = slab.filled
        self.arena.recycle(slab)
        return size

    def cancel_upload(self, key: str) -> bool:
        return self._uploads.pop(key, None) is not None

    def save_tensors(self, name: str, tensors: Mapping[str, bytes]) -> bool:
        run = self.arena.obtain_run(len(tensors))  # clean: all recycled in the finally
        if run is None:
            return False
        try:
            for slab, (key, payload) in zip(run, tensors.items()):
                slab.view[: len(payload)] = payload
                slab.filled = len(payload)
                self.manifest.entries[f"{name}/{key}"] = slab.filled
            return True
        finally:
            for slab in run:
                self.arena.recycle(slab)

    def compare(self, left: bytes, right: bytes) -> bool:
        a = self._fill(left)  # leak: kept when no second slab is to be had
        if a is None:
            return False
        b = self._fill(right)  # clean: recycled after the comparison
        if b is None:
            return False
        same = a.view[: a.filled] == b.view[: b.filled]
        self.arena.recycle(a)
        self.arena.recycle(b)
        return same

    def retry_write(self, payload: bytes, sink: Callable[[Slab], int], attempts: int = 3) -> int:
        for _ in range(attempts):
            slab = self._fill(payload)  # clean: near miss, the finally covers the continue and the return
            if slab is None:
                continue
            try:
                return sink(slab)
            except OSError:
                continue
            finally:
                self.arena.recycle(slab)
        return 0

    def retry_hot(self, payload: bytes, sink: Callable[[Slab], int], attempts: int = 3) -> int:
        for attempt in range(attempts):
            slab = self._fill(payload)  # leak: a failed attempt moves on without recycling
            if slab is None:
                break
            try:
                written = sink(slab)
            except OSError as exc:
                logger.info("attempt %d: %s", attempt, exc)
                continue
            self.arena.recycle(slab)
            return written
        return 0
