"""Asynchronous checkpoint service: device -> pinned staging -> shard files."""
from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

import torch


@dataclass(eq=False)
class Staging:
    storage: torch.Tensor
    used: int = 0


class StagingPool:
    def __init__(self, count: int, nbytes: int):
        self.nbytes = nbytes
        self._idle = [
            Staging(torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            for _ in range(count)
        ]
        self._lock = threading.Lock()

    def check_out(self) -> Staging | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def check_in(self, st: Staging) -> None:
        st.used = 0
        with self._lock:
            self._idle.append(st)


class SnapshotRegistry:
    """Steps with a pin count above zero survive retention."""

    def __init__(self, root: Path):
        self.root = root
        self._pins: dict[int, int] = {}
        self._mu = threading.Lock()

    def pin(self, step: int) -> Path:
        with self._mu:
            self._pins[step] = self._pins.get(step, 0) + 1
        return self.root / f"step_{step:08d}"

    def unpin(self, step: int) -> None:
        with self._mu:
            left = self._pins[step] - 1
            if left:
                self._pins[step] = left
            else:
                del self._pins[step]

    def removable(self, steps: list[int], keep: int) -> list[int]:
        with self._mu:
            return [s for s in sorted(steps)[:-keep] if s not in self._pins]


@dataclass
class SaveJob:
    step: int
    path: Path
    parts: dict[str, Staging] = field(default_factory=dict)
    scratch: Staging | None = None


class CheckpointService:
    def __init__(self, pool: StagingPool, registry: SnapshotRegistry):
        self.pool = pool
        self.registry = registry
        self.jobs: "queue.Queue[SaveJob | None]" = queue.Queue()
        self.failed: list[int] = []

    def _fill(self, st: Staging, t: torch.Tensor) -> None:
        raw = t.detach().contiguous().view(torch.uint8).flatten()
        st.storage[: raw.numel()].copy_(raw, non_blocking=True)
        st.used = raw.numel()

    def save_async(self, step: int, tensors: Mapping[str, torch.Tensor]) -> bool:
        path = self.registry.pin(step)  # leak: _abort() gives the staging back but never unpins the step
        job = SaveJob(step, path)
        for name, t in tensors.items():
            st = self.pool.check_out()  # clean: near miss, _abort() or _finish() checks every part in
            if st is None:
                self._abort(job)
                return False
            self._fill(st, t)
            job.parts[name] = st
        self.jobs.put(job)
        return True

    def save_delta(self, step: int, base: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> bool:
        scratch = self.pool.check_out()  # leak: _finish() walks the parts and forgets the scratch field
        if scratch is None:
            return False
        job = SaveJob(step, self.registry.pin(step), scratch=scratch)  # clean: unpinned in _finish once the worker wrote the job
        for name, t in new.items():
            self._fill(scratch, t - base[name])
            part = self.pool.check_out()  # leak: an all-zero delta is skipped while its buffer is held
            if part is None:
                break
            part.storage[: scratch.used].copy_(scratch.storage[: scratch.used])
            part.used = scratch.used
            if not bool(part.storage[: part.used].any()):
                continue
            job.parts[name] = part
        self.jobs.put(job)
        return True

    def save_now(self, step: int, name: str, t: torch.Tensor) -> bool:
        st = self.pool.check_out()  # clean: near miss, checked in on both ways after the write
        if st is None:
            return False
        path = self.registry.pin(step)  # clean: near miss, the handler and the normal way both unpin
        self._fill(st, t)
        try:
            self._write(path, name, st)
        except OSError:
            self.failed.append(step)
            self.pool.check_in(st)
            self.registry.unpin(step)
            return False
        self.pool.check_in(st)
        self.registry.unpin(step)
        return True

    def load_meta(self, step: int) -> dict[str, Any] | None:
        path = self.registry.pin(step)  # leak: a step without manifest returns None still pinned
        manifest = path / "manifest.json"
        if not manifest.exists():
            return None
        try:
            return json.loads(manifest.read_text())
        except json.JSONDecodeError:
            return None
        finally:
            self.registry.unpin(step)

    def verify(self, step: int, names: list[str]) -> list[str]:
        missing = []
        path = self.registry.pin(step)  # clean: near miss, unpinned after the scan
        for n in names:
            if (path / f"{n}.bin").exists():
                continue
            missing.append(n)
        self.registry.unpin(step)
        return missing

    def latest_complete(self, steps: list[int]) -> int | None:
        for step in sorted(steps, reverse=True):
            path = self.registry.pin(step)  # clean: near miss, the hit is handed pinned to resume_from, misses are unpinned
            if (path / "manifest.json").exists():
                return step
            self.registry.unpin(step)
        return None

    def resume_from(self, steps: list[int]) -> bytes | None:
        step = self.latest_complete(steps)  # clean: unpinned after the blob was read
        if step is None:
            return None
        blob = (self.registry.root / f"step_{step:08d}" / "model.bin").read_bytes()
        self.registry.unpin(step)
        return blob

    def _write(self, path: Path, name: str, st: Staging) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.bin").write_bytes(st.storage[: st.used].numpy().tobytes())

    def _finish(self, job: SaveJob) -> None:
        for st in job.parts.values():
            self.pool.check_in(st)
        job.parts.clear()
        self.registry.unpin(job.step)

    def _abort(self, job: SaveJob) -> None:
        for st in job.parts.values():
            self.pool.check_in(st)
        job.parts.clear()
        self.failed.append(job.step)

    def worker(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                for name, st in job.parts.items():
                    self._write(job.path, name, st)
                names = sorted(job.parts)
                (job.path / "manifest.json").write_text(json.dumps({"step": job.step, "parts": names}))
            except OSError:
                self.failed.append(job.step)
            self._finish(job)
