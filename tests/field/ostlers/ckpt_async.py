"""Asynchronous checkpoint writer: pinned staging areas, a background executor and a manifest on disk."""
from __future__ import annotations

import concurrent.futures as cf
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

import torch


@dataclass
class Staging:
    index: int
    data: torch.Tensor
    used: int = 0


class StagingPool:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._cond = threading.Condition()
        self._areas = [
            Staging(i, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)) for i in range(count)
        ]
        self._busy = [False] * count

    def reserve(self, timeout: Optional[float] = None) -> Optional[Staging]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._cond:
            while True:
                for i, busy in enumerate(self._busy):
                    if not busy:
                        self._busy[i] = True
                        return self._areas[i]
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._cond.wait(left)

    def release(self, area: Staging) -> None:
        with self._cond:
            area.used = 0
            self._busy[area.index] = False
            self._cond.notify()


class CheckpointWriter:
    def __init__(self, root: Path, pool: StagingPool, threads: int = 4):
        self.root = root
        self.pool = pool
        self._exec = cf.ThreadPoolExecutor(threads)
        self._step_gate = threading.Semaphore(1)
        self._manifest_lock = threading.Lock()
        self._manifest: Dict[str, Dict[str, object]] = {}
        self._shards: Dict[str, Tuple[cf.Future, Staging]] = {}
        self._optim: List[Tuple[cf.Future, Staging]] = []

    def _stage(self, tensor: torch.Tensor) -> Staging:
        raw = tensor.detach().contiguous().view(torch.uint8).flatten()
        if raw.numel() > self.pool.nbytes:
            raise ValueError(f"tensor of {raw.numel()} bytes exceeds the staging area")
        area = self.pool.reserve()  # clean: returned to the caller
        area.data[: raw.numel()].copy_(raw, non_blocking=True)
        area.used = raw.numel()
        return area

    def _write(self, name: str, area: Staging) -> str:
        path = self.root / f"{name}.bin"
        view = memoryview(area.data[: area.used].numpy())
        digest = hashlib.sha1(view).hexdigest()
        with open(path, "wb") as fh:  # clean: closed by with
            fh.write(view)
            os.fsync(fh.fileno())
        return digest

    def save_tensor(self, name: str, tensor: torch.Tensor) -> cf.Future:
        area = self._stage(tensor)  # clean: near miss, released by the done callback
        future = self._exec.submit(self._write, name, area)
        future.add_done_callback(lambda _f: self.pool.release(area))
        return future

    def save_blocking(self, name: str, tensor: torch.Tensor) -> Optional[str]:
        area = self._stage(tensor)  # leak: not released when the digest is already in the manifest
        digest = hashlib.sha1(area.data[: area.used].numpy()).hexdigest()
        if self._manifest.get(name, {}).get("sha1") == digest:
            return None
        self._write(name, area)
        self.pool.release(area)
        self._manifest[name] = {"sha1": digest, "bytes": tensor.numel() * tensor.element_size()}
        return digest

    def save_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            area = self._stage(tensor)  # leak: drain_shards skips the release for a failed write
            self._shards[name] = (self._exec.submit(self._write, name, area), area)

    def drain_shards(self) -> List[str]:
        failed: List[str] = []
        while self._shards:
            name, (future, area) = self._shards.popitem()
            if future.exception() is not None:
                failed.append(name)
                continue
            self._manifest[name] = {"sha1": future.result(), "bytes": area.used}
            self.pool.release(area)
        return failed

    def save_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            area = self._stage(tensor)  # clean: near miss, drain_optimizer releases failed ones too
            self._optim.append((self._exec.submit(self._write, f"optim-{name}", area), area))

    def drain_optimizer(self) -> int:
        failed = 0
        for future, area in self._optim:
            failed += future.exception() is not None
            self.pool.release(area)
        self._optim.clear()
        return failed

    def begin_step(self) -> bool:
        if not self._step_gate.acquire(blocking=False):  # clean: near miss, end_step releases the gate
            return False
        self._manifest.clear()
        return True

    def end_step(self, step: int) -> List[str]:
        failed = self.drain_shards()
        self.drain_optimizer()
        self.write_manifest(step)
        self._step_gate.release()
        return failed

    def _copy_verified(self, tensor: torch.Tensor, area: Staging) -> bool:
        raw = tensor.detach().contiguous().view(torch.uint8).flatten()
        area.data[: raw.numel()].copy_(raw)
        area.used = raw.numel()
        return bool(torch.equal(area.data[: raw.numel()], raw.cpu()))

    def stage_with_retry(self, tensor: torch.Tensor, attempts: int = 3) -> Optional[Staging]:
        """A staging area whose contents were read back, for the caller to release."""
        for attempt in range(attempts):
            area = self.pool.reserve(timeout=5.0)  # leak: an area that fails the check is lost by the retry
            if area is None:
                continue
            if self._copy_verified(tensor, area):
                return area
            time.sleep(0.1 * 2**attempt)
        return None

    def save_verified(self, name: str, tensor: torch.Tensor) -> bool:
        area = self.stage_with_retry(tensor)  # clean: None or released
        if area is None:
            return False
        self._write(name, area)
        self.pool.release(area)
        return True

    def write_manifest(self, step: int) -> None:
        self._manifest_lock.acquire()  # clean: released in finally
        try:
            tmp = self.root / f".manifest-{step}.tmp"
            out = open(tmp, "w", encoding="utf-8")  # clean: closed before the rename
            json.dump({"step": step, "tensors": self._manifest}, out, indent=1)
            out.close()
            os.replace(tmp, self.root / "manifest.json")
        finally:
            self._manifest_lock.release()

    def merge_manifest(self, other: Mapping[str, Dict[str, object]]) -> int:
        self._manifest_lock.acquire()  # leak: return 0 for an empty update keeps the lock
        fresh = {k: v for k, v in other.items() if k not in self._manifest}
        if not fresh:
            return 0
        self._manifest.update(fresh)
        self._manifest_lock.release()
        return len(fresh)

    def close(self) -> None:
        self.drain_shards()
        self.drain_optimizer()
        self._exec.shutdown(wait=True)


def latest_step(root: Path) -> int:
    path = root / "manifest.json"
    if not path.exists():
        return -1
    fh = open(path, encoding="utf-8")  # leak: not closed when the manifest is empty
    text = fh.read()
    if not text.strip():
        return -1
    step = json.loads(text)["step"]
    fh.close()
    return int(step)
