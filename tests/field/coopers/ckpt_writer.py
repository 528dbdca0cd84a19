"""Background checkpoint writer: arena segments are filled on the train thread, written on another."""
from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

import torch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Segment:
    buf: bytearray
    length: int = 0


class SegmentArena:
    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self._ready: queue.SimpleQueue[Segment] = queue.SimpleQueue()
        for _ in range(count):
            self._ready.put(Segment(bytearray(size)))

    def claim(self, timeout: float | None = None) -> Segment | None:
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            return None

    def recycle(self, seg: Segment) -> None:
        seg.length = 0
        self._ready.put(seg)


class StepLock:
    """O_EXCL marker file: one writer per step directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def acquire(self, step: int) -> bool:
        try:
            fd = os.open(self.root / f"{step}.lock", os.O_CREAT | os.O_EXCL)  # clean: closed on the next line, only the marker stays
            os.close(fd)
        except FileExistsError:
            return False
        return True

    def release(self, step: int) -> None:
        (self.root / f"{step}.lock").unlink(missing_ok=True)


class CheckpointWriter:
    def __init__(self, root: Path, arena: SegmentArena, lock: StepLock) -> None:
        self.root = root
        self.arena = arena
        self.lock = lock
        self._jobs: queue.Queue[tuple[Path, Segment] | None] = queue.Queue()
        self._errors: list[str] = []
        self._parked: dict[str, Segment] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _write(self, path: Path, seg: Segment) -> bool:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)  # clean: closed in the inner finally
            try:
                os.write(fd, memoryview(seg.buf)[: seg.length])
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as e:
            self._errors.append(f"{path}: {e}")
            return False
        return True

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            path, seg = job
            try:
                self._write(path, seg)
            finally:
                self.arena.recycle(seg)

    def _fill(self, seg: Segment, t: torch.Tensor) -> bool:
        raw = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if len(raw) > len(seg.buf):
            return False
        seg.buf[: len(raw)] = raw
        seg.length = len(raw)
        return True

    def save_tensor(self, step: int, name: str, t: torch.Tensor) -> bool:
        seg = self.arena.claim(timeout=30)  # leak: a tensor that does not fit returns False and the segment is gone
        if seg is None:
            return False
        if not self._fill(seg, t):
            log.error("%s does not fit in one segment", name)
            return False
        self._jobs.put((self.root / str(step) / f"{name}.bin", seg))
        return True

    def save(self, step: int, state: Mapping[str, torch.Tensor]) -> bool:
        if not self.lock.acquire(step):  # clean: near miss, the finally releases after break as well
            return False
        try:
            (self.root / str(step)).mkdir(parents=True, exist_ok=True)
            for name, t in state.items():
                if not self.save_tensor(step, name, t):
                    break
            else:
                return True
            return False
        finally:
            self.lock.release(step)

    def save_rank0_meta(self, step: int, meta: bytes) -> bool:
        if not self.lock.acquire(step):  # leak: no free segment returns with the marker file still there
            return False
        seg = self.arena.claim(timeout=1)  # clean: recycled after the synchronous write
        if seg is None:
            return False
        seg.buf[: len(meta)] = meta
        seg.length = len(meta)
        ok = self._write(self.root / str(step) / "meta.bin", seg)
        self.arena.recycle(seg)
        self.lock.release(step)
        return ok

    def save_sync(self, path: Path, t: torch.Tensor) -> bool:
        seg = self.arena.claim()  # clean: near miss, filled or not, written or not, it is recycled
        if seg is None:
            return False
        ok = self._fill(seg, t) and self._write(path, seg)
        self.arena.recycle(seg)
        return ok

    def save_many(self, step: int, state: Mapping[str, torch.Tensor]) -> int:
        claimed: list[tuple[str, Segment]] = []
        for name in state:
            seg = self.arena.claim(timeout=0.5)  # leak: coming up short returns 0 while the claimed ones stay in the local list
            if seg is None:
                log.warning("step %d: only %d of %d segments", step, len(claimed), len(state))
                return 0
            claimed.append((name, seg))
        n = 0
        for name, seg in claimed:
            if not self._fill(seg, state[name]):
                self.arena.recycle(seg)
                continue
            self._jobs.put((self.root / str(step) / f"{name}.bin", seg))
            n += 1
        return n

    def park_optimizer(self, group: str, t: torch.Tensor) -> bool:
        """Keep the previous optimizer state in memory for a cheap rollback."""
        seg = self.arena.claim(timeout=0)  # clean: near miss, recycled when it does not fit, and a former one is recycled before
        if seg is None:
            return False
        if not self._fill(seg, t):
            self.arena.recycle(seg)
            return False
        prev = self._parked.pop(group, None)
        if prev is not None:
            self.arena.recycle(prev)
        self._parked[group] = seg
        return True

    def unpark(self, group: str) -> bytes | None:
        seg = self._parked.pop(group, None)
        if seg is None:
            return None
        out = bytes(seg.buf[: seg.length])
        self.arena.recycle(seg)
        return out

    def wait_for_step(self, step: int, tries: int = 5) -> bool:
        for _ in range(tries):
            if self.lock.acquire(step):  # clean: near miss, only tests that nobody writes and releases at once
                self.lock.release(step)
                return True
            threading.Event().wait(0.2)
        return False

    def close(self) -> list[str]:
        self._jobs.put(None)
        self._thread.join()
        for seg in self._parked.values():
            self.arena.recycle(seg)
        self._parked.clear()
        return self._errors
