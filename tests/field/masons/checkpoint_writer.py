"""Asynchronous sharded checkpoint writer."""
from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Dict, List, Optional


class StagingBuffers:
    def __init__(self, count: int, size: int) -> None:
        self._free = [bytearray(size) for _ in range(count)]
        self._cond = threading.Condition()

    def borrow(self, block: bool = True) -> Optional[bytearray]:
        with self._cond:
            while not self._free:
                if not block:
                    return None
                self._cond.wait()
            return self._free.pop()

    def restore(self, buf: bytearray) -> None:
        with self._cond:
            self._free.append(buf)
            self._cond.notify()


class StepLeases:
    """Steps which retention must not delete."""

    def __init__(self) -> None:
        self._counts: Dict[int, int] = {}

    def hold(self, step: int) -> None:
        self._counts[step] = self._counts.get(step, 0) + 1

    def drop(self, step: int) -> None:
        left = self._counts.get(step, 0) - 1
        if left <= 0:
            self._counts.pop(step, None)
        else:
            self._counts[step] = left

    def held(self, step: int) -> bool:
        return step in self._counts


@dataclass
class Shard:
    name: str
    payload: bytes


class CheckpointWriter:
    def __init__(self, root: Path, buffers: StagingBuffers, workers: int = 4) -> None:
        self.root = root
        self.buffers = buffers
        self.leases = StepLeases()
        self.pool = ThreadPoolExecutor(workers)
        self.pending: Dict[int, List["Future[None]"]] = {}
        self.log: Optional[BinaryIO] = None
        self._save_lock = threading.Lock()

    def _step_dir(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _write_shard(self, path: Path, buf: bytearray, n: int) -> None:
        try:
            with open(path, "wb") as fh:
                fh.write(memoryview(buf)[:n])
                os.fsync(fh.fileno())
        finally:
            self.buffers.restore(buf)

    def save_async(self, step: int, shards: List[Shard]) -> bool:
        if step in self.pending:
            return False
        self.leases.hold(step)  # clean: wait() drops it after the futures are through
        folder = self._step_dir(step)
        folder.mkdir(parents=True, exist_ok=True)
        futures: List["Future[None]"] = []
        for shard in shards:
            buf = self.buffers.borrow()  # leak: an empty shard continues without restore
            if not shard.payload:
                continue
            n = len(shard.payload)
            buf[:n] = shard.payload
            futures.append(self.pool.submit(self._write_shard, folder / shard.name, buf, n))
        self.pending[step] = futures
        return True

    def wait(self, step: int) -> bool:
        futures = self.pending.pop(step, None)
        if futures is None:
            return False
        ok = all(f.exception() is None for f in futures)
        self.leases.drop(step)
        return ok

    def save_sync(self, step: int, shards: List[Shard]) -> bool:
        if not self._save_lock.acquire(blocking=False):  # leak: the return for an existing step keeps the lock
            return False
        folder = self._step_dir(step)
        if folder.exists():
            return False
        folder.mkdir(parents=True)
        for shard in shards:
            buf = self.buffers.borrow()  # clean: near miss, _write_shard restores it in its finally
            n = len(shard.payload)
            buf[:n] = shard.payload
            self._write_shard(folder / shard.name, buf, n)
        self._save_lock.release()
        return True

    def load(self, step: int, name: str) -> Optional[bytes]:
        self.leases.hold(step)  # leak: a missing file returns None and the step stays held
        try:
            fh = open(self._step_dir(step) / name, "rb")  # clean: closed before the return
        except FileNotFoundError:
            return None
        data = fh.read()
        fh.close()
        self.leases.drop(step)
        return data

    def read_index(self, step: int) -> Dict[str, int]:
        fh = open(self._step_dir(step) / "index.json", "r")  # leak: the handled decode error returns before close
        try:
            index = json.load(fh)
        except json.JSONDecodeError:
            return {}
        fh.close()
        return index

    def read_meta(self, step: int) -> Dict[str, str]:
        fh = open(self._step_dir(step) / "meta.json", "r")  # clean: near miss, the finally closes on the handled error too
        try:
            return json.load(fh)
        except json.JSONDecodeError:
            return {}
        finally:
            fh.close()

    def verify(self, step: int, names: List[str]) -> List[str]:
        self.leases.hold(step)  # clean: near miss, one drop after the loop, and the loop has no other exit
        bad: List[str] = []
        for name in names:
            path = self._step_dir(step) / name
            if not path.exists() or path.stat().st_size == 0:
                bad.append(name)
                continue
        self.leases.drop(step)
        return bad

    def open_log(self, step: int) -> None:
        if self.log is not None:
            self.log.close()
        self.log = open(self.root / f"log-{step}.bin", "ab")  # clean: near miss, the former is closed above, close() ends the last

    def rotate_log(self, step: int) -> None:
        if self.log is None or self.log.tell() < 1 << 20:
            return
        self.log.flush()
        self.log = open(self.root / f"log-{step}.bin", "ab")  # leak: the full log is flushed, not closed, and overwritten

    def try_snapshot(self, step: int, payload: bytes) -> bool:
        buf = self.buffers.borrow(block=False)  # clean: near miss, handed to the worker or restored when too big
        if buf is None:
            return False
        if len(payload) > len(buf):
            self.buffers.restore(buf)
            return False
        buf[:len(payload)] = payload
        fut = self.pool.submit(self._write_shard, self.root / f"snap-{step}", buf, len(payload))
        self.pending.setdefault(-step, []).append(fut)
        return True

    def prune(self, keep: int) -> int:
        steps = sorted(int(p.name.split("-")[1]) for p in self.root.glob("step-*"))
        removed = 0
        for step in steps[:-keep]:
            if self.leases.held(step):
                continue
            for path in self._step_dir(step).iterdir():
                path.unlink()
            self._step_dir(step).rmdir()
            removed += 1
        return removed

    def close(self) -> None:
        for step in list(self.pending):
            if step >= 0:
                self.wait(step)
        self.pool.shutdown(wait=True)
        if self.log is not None:
            self.log.close()
            self.log = None
