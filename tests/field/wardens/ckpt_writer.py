from __future__ import annotations

import hashlib
import logging
import os
import queue
import shutil
import threading
from dataclasses import dataclass
from typing import Optional, Sequence

import torch

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StagingSlot:
    index: int
    storage: torch.Tensor
    used: int = 0


class StagingArea:
    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._cond = threading.Condition()
        self._free = [
            StagingSlot(i, torch.empty(slot_bytes, dtype=torch.uint8).pin_memory()) for i in range(slots)
        ]

    def checkout(self, timeout: Optional[float] = None) -> Optional[StagingSlot]:
        with self._cond:
            if not self._cond.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop()

    def checkin(self, slot: StagingSlot) -> None:
        slot.used = 0
        with self._cond:
            self._free.append(slot)
            self._cond.notify()


class ShardFiles:
    def __init__(self, root: str) -> None:
        self.root = root
        self.live: set[int] = set()

    def open_shard(self, rel: str, write: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        fd = os.open(os.path.join(self.root, rel), flags, 0o644)
        self.live.add(fd)
        return fd

    def close_shard(self, fd: int) -> None:
        self.live.discard(fd)
        os.close(fd)


class StepRegistry:
    def __init__(self, root: str) -> None:
        self.root = root
        self._pins: dict[int, int] = {}
        self._lock = threading.Lock()

    def pin(self, step: int) -> None:
        with self._lock:
            self._pins[step] = self._pins.get(step, 0) + 1

    def unpin(self, step: int) -> None:
        with self._lock:
            left = self._pins[step] - 1
            if left:
                self._pins[step] = left
            else:
                del self._pins[step]

    def prune(self, keep: Sequence[int]) -> None:
        for entry in os.listdir(self.root):
            step = int(entry.removeprefix("step_"))
            if step not in keep and step not in self._pins:
                shutil.rmtree(os.path.join(self.root, entry))


class AsyncCheckpointWriter:
    def __init__(self, staging: StagingArea, files: ShardFiles, steps: StepRegistry) -> None:
        self.staging = staging
        self.files = files
        self.steps = steps
        self._queue: queue.Queue[Optional[tuple[int, str, StagingSlot]]] = queue.Queue()
        self._urgent: queue.Queue[tuple[int, StagingSlot]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def save_async(self, step: int, name: str, tensor: torch.Tensor) -> bool:
        slot = self.staging.checkout(timeout=30.0)  # leak: the worker's handled write error drops the slot
        if slot is None:
            return False
        slot.used = tensor.numel() * tensor.element_size()
        slot.storage[: slot.used].copy_(tensor.view(torch.uint8).reshape(-1))
        self._queue.put((step, name, slot))
        return True

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            step, name, slot = item
            try:
                self._write(f"step_{step}/{name}.bin", slot)
            except OSError as exc:
                logger.error("shard %s of step %d not written: %s", name, step, exc)
                continue
            self.staging.checkin(slot)

    def _write(self, rel: str, slot: StagingSlot) -> None:
        fd = self.files.open_shard(rel, write=True)  # clean: closed in finally
        try:
            os.write(fd, slot.storage[: slot.used].numpy().tobytes())
            os.fsync(fd)
        finally:
            self.files.close_shard(fd)

    def save_now(self, step: int, name: str, tensor: torch.Tensor) -> bool:
        slot = self.staging.checkout()  # clean: near miss, the handled error returns through finally
        if slot is None:
            return False
        try:
            slot.used = tensor.numel() * tensor.element_size()
            slot.storage[: slot.used].copy_(tensor.view(torch.uint8).reshape(-1))
            self._write(f"step_{step}/{name}.bin", slot)
        except OSError:
            logger.exception("emergency save failed")
            return False
        finally:
            self.staging.checkin(slot)
        return True

    def stage_rng(self, step: int) -> None:
        slot = self.staging.checkout(timeout=1.0)  # clean: near miss, goes through _urgent and flush_urgent checks in every slot
        if slot is None:
            return
        state = torch.get_rng_state()
        slot.used = state.numel()
        slot.storage[: slot.used].copy_(state)
        self._urgent.put((step, slot))

    def flush_urgent(self) -> int:
        failed = 0
        while not self._urgent.empty():
            step, slot = self._urgent.get()
            try:
                self._write(f"step_{step}/rng.bin", slot)
            except OSError:
                failed += 1
            self.staging.checkin(slot)
        return failed

    def verify(self, rel: str, digest: str) -> bool:
        fd = self.files.open_shard(rel, write=False)  # leak: an empty shard returns before the close
        size = os.fstat(fd).st_size
        if size == 0:
            return False
        found = hashlib.sha256(os.pread(fd, size, 0)).hexdigest()
        self.files.close_shard(fd)
        return found == digest

    def shutdown(self) -> None:
        self.flush_urgent()
        self._queue.put(None)
        self._thread.join()


class CheckpointReader:
    def __init__(self, files: ShardFiles, steps: StepRegistry) -> None:
        self.files = files
        self.steps = steps
        self._open: dict[str, int] = {}

    def _handle(self, rel: str) -> int:
        fd = self._open.get(rel)
        if fd is None:
            fd = self.files.open_shard(rel, write=False)  # clean: near miss, cached per name, close() closes all
            self._open[rel] = fd
        return fd

    def close(self) -> None:
        for fd in self._open.values():
            self.files.close_shard(fd)
        self._open.clear()

    def load(self, step: int, names: Sequence[str]) -> Optional[dict[str, bytes]]:
        self.steps.pin(step)  # leak: a missing shard returns with the step still pinned
        out: dict[str, bytes] = {}
        for name in names:
            try:
                fd = self._handle(f"step_{step}/{name}.bin")
            except FileNotFoundError:
                return None
            out[name] = os.pread(fd, os.fstat(fd).st_size, 0)
        self.steps.unpin(step)
        return out

    def merge(self, step: int, parts: Sequence[str], target: str) -> int:
        total = 0
        out = self.files.open_shard(f"step_{step}/{target}", write=True)  # clean: near miss, closed after the loop which only continues
        for part in parts:
            src = self.files.open_shard(f"step_{step}/{part}", write=False)  # leak: padding shards continue without the close
            size = os.fstat(src).st_size
            if size <= 8:
                continue
            total += os.write(out, os.pread(src, size, 0))
            self.files.close_shard(src)
        self.files.close_shard(out)
        return total
