"""Asynchronous checkpoint writer: host copies are bounded by a byte budget, files written by threads."""
from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Optional

log = logging.getLogger("ckpt")

_STOP = object()


class ByteBudget:
    """Bounds the host memory taken by snapshots that are not on disk yet."""

    def __init__(self, limit: int):
        self.limit = limit
        self._used = 0
        self._cv = threading.Condition()

    def charge(self, nbytes: int) -> None:
        with self._cv:
            while self._used + nbytes > self.limit:
                self._cv.wait()
            self._used += nbytes

    def try_charge(self, nbytes: int) -> bool:
        with self._cv:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def refund(self, nbytes: int) -> None:
        with self._cv:
            self._used -= nbytes
            self._cv.notify_all()


@dataclass
class WriteTask:
    path: str
    payload: bytes
    step: int
    charged: int = 0
    on_done: List[Callable[[str], None]] = field(default_factory=list)


class CheckpointWriter:
    def __init__(self, root: str, budget: ByteBudget, workers: int = 2):
        self.root = root
        self.budget = budget
        self._queue: "queue.Queue" = queue.Queue()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(workers)]
        self._manifest_lock = threading.Lock()
        self._manifest: Dict[str, int] = {}
        self._superseded: List[WriteTask] = []
        for thread in self._threads:
            thread.start()

    def save(self, name: str, payload: bytes, step: int) -> None:
        size = len(payload)
        self.budget.charge(size)  # clean: near miss, the task carries the charge and _run refunds it
        self._queue.put(WriteTask(os.path.join(self.root, name), payload, step, charged=size))

    def save_if_room(self, name: str, payload: bytes, step: int) -> bool:
        if not self.budget.try_charge(len(payload)):  # leak: an already recorded step returns with the charge
            return False
        with self._manifest_lock:
            if self._manifest.get(name, -1) >= step:
                return False
        task = WriteTask(os.path.join(self.root, name), payload, step, charged=len(payload))
        self._queue.put(task)
        return True

    def save_untracked(self, name: str, payload: bytes, step: int) -> None:
        self.budget.charge(len(payload))  # leak: the task says charged=0, so _run refunds nothing
        self._queue.put(WriteTask(os.path.join(self.root, name), payload, step))

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            if task is _STOP:
                return
            try:
                self._write(task)
                for callback in task.on_done:
                    callback(task.path)
            finally:
                self.budget.refund(task.charged)

    def _write(self, task: WriteTask) -> None:
        tmp = task.path + ".tmp"
        with open(tmp, "wb") as fh:  # clean: with block
            fh.write(task.payload)
            fh.flush()
            os.fsync(fh.fileno())
        os.replace(tmp, task.path)
        with self._manifest_lock:
            self._manifest[os.path.basename(task.path)] = task.step

    def save_rolling(self, name: str, payload: bytes, step: int) -> None:
        """Queue a snapshot; older ones of the same name that still wait are pulled out."""
        self.budget.charge(len(payload))  # clean: refunded by _run or when pulled out
        waiting: List[WriteTask] = []
        stop = 0
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is _STOP:
                stop += 1
            elif os.path.basename(item.path) == name:
                self.budget.refund(item.charged)
            else:
                waiting.append(item)
        for item in waiting:
            self._queue.put(item)
        self._queue.put(WriteTask(os.path.join(self.root, name), payload, step, charged=len(payload)))
        for _ in range(stop):
            self._queue.put(_STOP)

    def write_manifest(self) -> str:
        path = os.path.join(self.root, "manifest.json")
        fh = open(path, "w")  # clean: closed below
        with self._manifest_lock:
            json.dump(self._manifest, fh, indent=2, sort_keys=True)
        fh.close()
        return path

    def latest_step(self) -> Optional[int]:
        path = os.path.join(self.root, "manifest.json")
        if not os.path.exists(path):
            return None
        fh = open(path)  # leak: an empty manifest returns before the close
        manifest = json.load(fh)
        if not manifest:
            return None
        step = max(manifest.values())
        fh.close()
        return step

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(_STOP)
        for thread in self._threads:
            thread.join()


class ShardFile:
    """Append-only shard container with an index."""

    def __init__(self, path: str):
        self.path = path
        self._data = open(path + ".bin", "ab")  # clean: closed by close
        self._index = open(path + ".idx", "a")  # leak: close closes the data file only
        self._count = 0

    def append(self, key: str, blob: bytes) -> None:
        offset = self._data.tell()
        self._data.write(blob)
        self._index.write(f"{key}\t{offset}\t{len(blob)}\n")
        self._count += 1

    def close(self) -> None:
        self._data.flush()
        os.fsync(self._data.fileno())
        self._data.close()


class Journal:
    def __init__(self, path: str, max_bytes: int):
        self.path = path
        self.max_bytes = max_bytes
        self._fh = None
        self._mirror = None
        self._seq = 0

    def log(self, record: Dict) -> None:
        if self._fh is None:
            self._fh = open(self.path, "a")  # clean: near miss, closed by _roll or close
        self._fh.write(json.dumps({"t": time.time(), **record}) + "\n")
        if self._fh.tell() > self.max_bytes:
            self._roll()

    def _roll(self) -> None:
        self._fh.close()
        self._fh = None
        self._seq += 1
        os.replace(self.path, f"{self.path}.{self._seq}")
        self._mirror = open(f"{self.path}.{self._seq}.mirror", "w")  # leak: overwritten at the next roll
        self._mirror.write(json.dumps({"rolled": self._seq}) + "\n")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
        if self._mirror is not None:
            self._mirror.close()


def open_shard(root: str, rank: int):
    """Shard of one rank, opened for reading; the caller closes it."""
    return open(os.path.join(root, f"rank{rank:05d}.bin"), "rb")  # clean: handed to the caller


def shard_sizes(root: str, world: int) -> List[int]:
    sizes = []
    for rank in range(world):
        fh = open_shard(root, rank)  # leak: only the last handle is closed
        fh.seek(0, os.SEEK_END)
        sizes.append(fh.tell())
    fh.close()
    return sizes


def merge_shards(root: str, world: int, out_path: str) -> int:
    total = 0
    with open(out_path, "wb") as out:  # clean: with block
        for rank in range(world):
            with open_shard(root, rank) as src:  # clean: with block
                while True:
                    chunk = src.read(1 << 20)
                    if not chunk:
                        break
                    out.write(chunk)
                    total += len(chunk)
    return total
