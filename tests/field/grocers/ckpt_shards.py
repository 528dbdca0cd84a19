"""Checkpoint shards: staging buffers, shard files, writer permits."""
from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, Dict, List, Optional

import torch

log = logging.getLogger(__name__)


class StagingPool:
    """Pinned staging buffers, get() blocks until one is free."""

    def __init__(self, count: int, nbytes: int):
        self._free = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._cond = threading.Condition()

    def get(self) -> torch.Tensor:
        with self._cond:
            while not self._free:
                self._cond.wait()
            return self._free.pop()

    def put_back(self, buf: torch.Tensor) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


class ShardFiles:
    """Keeps one open file per shard of the running checkpoint."""

    def __init__(self, root: str):
        self.root = root
        self.files: Dict[str, BinaryIO] = {}

    def file_of(self, name: str) -> BinaryIO:
        fh = self.files.get(name)
        if fh is None:
            fh = open(os.path.join(self.root, name), "wb")  # clean: near miss, cached by name, finish closes all
            self.files[name] = fh
        return fh

    def finish(self) -> None:
        for fh in self.files.values():
            fh.flush()
            fh.close()
        self.files = {}


class RollingWriter:
    def __init__(self, root: str, limit: int):
        self.root = root
        self.limit = limit
        self.part = 0
        self.size = 0
        self.fh: Optional[BinaryIO] = None

    def _roll(self) -> None:
        self.part += 1
        self.size = 0
        self.fh = open(os.path.join(self.root, f"part-{self.part:05d}"), "wb")  # leak: rolling over rebinds the file of the former part

    def write(self, data: bytes) -> None:
        if self.fh is None or self.size + len(data) > self.limit:
            self._roll()
        self.fh.write(data)
        self.size += len(data)

    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class AsyncSaver:
    """Copies shards to staging and writes them on a thread."""

    def __init__(self, pool: StagingPool, root: str):
        self.pool = pool
        self.root = root
        self.exec = ThreadPoolExecutor(2)
        self.pending: Dict[str, Future] = {}

    def save(self, name: str, t: torch.Tensor) -> Future:
        buf = self.pool.get()  # clean: handed to the task, whose finally puts it back
        raw = t.detach().reshape(-1).view(torch.uint8)
        buf[: raw.numel()].copy_(raw)
        fut = self.exec.submit(self._write, name, buf, raw.numel())
        self.pending[name] = fut
        return fut

    def _write(self, name: str, buf: torch.Tensor, n: int) -> None:
        try:
            with open(os.path.join(self.root, name), "wb") as fh:  # clean: with
                fh.write(buf[:n].numpy().tobytes())
        finally:
            self.pool.put_back(buf)


class CancellableSaver(AsyncSaver):
    """A newer save of a shard replaces the queued one."""

    def save(self, name: str, t: torch.Tensor) -> Future:
        old = self.pending.get(name)
        if old is not None:
            old.cancel()
        raw = t.detach().reshape(-1).view(torch.uint8)
        buf = self.pool.get()  # leak: a queued task that is cancelled never runs its finally
        buf[: raw.numel()].copy_(raw)
        self.pending[name] = self.exec.submit(self._write, name, buf, raw.numel())
        return self.pending[name]


class SnapshotSet:
    """Staged tensors of one step until they are committed or thrown away."""

    def __init__(self, pool: StagingPool):
        self.pool = pool
        self.staged: Dict[str, torch.Tensor] = {}
        self.large: List[torch.Tensor] = []

    def stage(self, state: Dict[str, torch.Tensor]) -> None:
        if self.staged:
            raise RuntimeError("a step is still staged")
        for name, t in state.items():
            raw = t.detach().reshape(-1).view(torch.uint8)
            if raw.numel() <= self.pool_bytes():
                buf = self.pool.get()  # clean: near miss, names are dict keys of one step, commit and discard empty it
                buf[: raw.numel()].copy_(raw)
                self.staged[name] = buf
                continue
            for chunk in raw.split(self.pool_bytes()):
                piece = self.pool.get()  # leak: discard puts back the named ones and only clears the large list
                piece[: chunk.numel()].copy_(chunk)
                self.large.append(piece)

    def pool_bytes(self) -> int:
        return 1 << 26

    def commit(self, out: BinaryIO) -> None:
        for buf in list(self.staged.values()) + self.large:
            out.write(buf.numpy().tobytes())
            self.pool.put_back(buf)
        self.staged.clear()
        self.large.clear()

    def discard(self) -> None:
        for buf in self.staged.values():
            self.pool.put_back(buf)
        self.staged.clear()
        self.large.clear()


class UploadGate:
    """Limits uploads over the whole node."""

    def __init__(self, permits: int, client):
        self.sem = threading.BoundedSemaphore(permits)
        self.client = client

    def upload(self, path: str) -> bool:
        self.sem.acquire()  # leak: the empty shard returns True without release
        if os.path.getsize(path) == 0:
            os.unlink(path)
            return True
        try:
            self.client.put(path)
            return True
        except ConnectionError:
            return False
        finally:
            self.sem.release()

    def upload_async(self, path: str) -> Future:
        self.sem.acquire()  # clean: the done callback releases
        fut = self.client.put_async(path)
        fut.add_done_callback(lambda _f: self.sem.release())
        return fut


class ShardReader:
    """Opens every shard of an index; a broken shard fails the load."""

    def __init__(self, root: str):
        self.root = root
        self.open_files: List[BinaryIO] = []

    def load_index(self) -> List[str]:
        with open(os.path.join(self.root, "index.json")) as fh:  # clean: with
            return json.load(fh)["shards"]

    def open_all(self) -> bool:
        opened = []
        for name in self.load_index():
            try:
                fh = open(os.path.join(self.root, name), "rb")  # leak: a missing later shard returns False with opened dropped
            except FileNotFoundError:
                log.error("shard %s is missing", name)
                return False
            opened.append(fh)
        self.open_files.extend(opened)
        return True

    def open_some(self, names: List[str]) -> List[BinaryIO]:
        got: List[BinaryIO] = []
        for name in names:
            try:
                got.append(open(os.path.join(self.root, name), "rb"))  # clean: near miss, the except branch closes what was opened
            except FileNotFoundError:
                while got:
                    got.pop().close()
                break
        self.open_files.extend(got)
        return got

    def close(self) -> None:
        for fh in self.open_files:
            fh.close()
        self.open_files.clear()
