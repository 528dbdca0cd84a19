"""Background checkpoint writer.

Device tensors are copied into pinned host buffers on the training thread and
flushed to disk by a few writer threads, so that the step loop is blocked only
for the copies.  One StagingArea exists per rank.
"""
from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from pathlib import Path

import torch

log = logging.getLogger(__name__)

STOP = object()


class StagingExhausted(RuntimeError):
    pass


class HostBuffer:
    __slots__ = ("storage", "used", "tag")

    def __init__(self, nbytes: int):
        self.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.used = 0
        self.tag = None

    @property
    def room(self) -> int:
        return self.storage.numel() - self.used

    def fill(self, tensor: torch.Tensor) -> int:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        n = flat.numel()
        if n > self.room:
            raise ValueError(f"{self.tag}: {n} bytes do not fit into {self.room}")
        self.storage[self.used:self.used + n].copy_(flat, non_blocking=True)
        self.used += n
        return n


class StagingArea:
    def __init__(self, count: int, nbytes: int):
        self._idle = [HostBuffer(nbytes) for _ in range(count)]
        self._cond = threading.Condition()
        self.nbytes = nbytes  # the smallest size a caller may count on

    def checkout(self, tag: str, timeout: float = 30.0) -> HostBuffer:
        deadline = time.monotonic() + timeout
        with self._cond:
            while not self._idle:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StagingExhausted(tag)
                self._cond.wait(left)
            buf = self._idle.pop()  # clean: handed to the caller
            buf.tag, buf.used = tag, 0
            return buf

    def try_checkout(self, tag: str) -> HostBuffer | None:
        with self._cond:
            if not self._idle:
                return None
            buf = self._idle.pop()  # clean: handed to the caller
        buf.tag, buf.used = tag, 0
        return buf

    def checkin(self, buf: HostBuffer) -> None:
        with self._cond:
            buf.tag = None
            self._idle.append(buf)
            self._cond.notify()

    def grow(self, nbytes: int) -> int:
        swapped = []
        with self._cond:
            while self._idle:
                buf = self._idle.pop()  # leak: a buffer that is already large enough is skipped and never put back
                if buf.storage.numel() >= nbytes:
                    continue
                buf.storage = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
                swapped.append(buf)
            self._idle.extend(swapped)
            self._cond.notify_all()
        return len(swapped)


class WriteJob:
    """A filled buffer on its way to disk; the writer thread finishes it."""

    def __init__(self, path: Path, buf: HostBuffer, area: StagingArea):
        self.path = path
        self.buf = buf
        self.area = area

    def run(self) -> None:
        payload = self.buf.storage[:self.buf.used].numpy().tobytes()
        tmp = self.path.with_suffix(".tmp")
        tmp.write_bytes(payload)
        os.replace(tmp, self.path)

    def finish(self) -> None:
        if self.buf is not None:
            self.area.checkin(self.buf)
            self.buf = None


class WriterPool:
    def __init__(self, threads: int = 2):
        self._jobs: queue.Queue = queue.Queue()
        self.failed: list[Path] = []
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(threads)]
        for t in self._threads:
            t.start()

    def submit(self, job: WriteJob) -> None:
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is STOP:
                return
            try:
                job.run()
            except OSError as exc:
                log.error("write of %s failed: %s", job.path, exc)
                self.failed.append(job.path)
            finally:
                job.finish()

    def shutdown(self) -> None:
        for _ in self._threads:
            self._jobs.put(STOP)
        for t in self._threads:
            t.join()


class CheckpointStager:
    def __init__(self, area: StagingArea, writers: WriterPool, root: Path):
        self.area = area
        self.writers = writers
        self.root = root
        self.skipped: list[str] = []
        self._shared: dict[int, HostBuffer] = {}

    def stage_large(self, state: dict[str, torch.Tensor]) -> int:
        for name, tensor in state.items():
            buf = self.area.checkout(name)  # leak: fill() raises ValueError for oversized tensors and the handler moves on
            try:
                buf.fill(tensor)
            except ValueError as exc:
                log.warning("not staged: %s", exc)
                self.skipped.append(name)
                continue
            self.writers.submit(WriteJob(self.root / f"{name}.bin", buf, self.area))
        torch.cuda.current_stream().synchronize()
        return len(state) - len(self.skipped)

    def stage_small(self, tensors: list[torch.Tensor]) -> int:
        """Pack tensors that are smaller than a buffer back to back."""
        part = 0
        buf = self.area.checkout("small-0")  # leak: when nothing was packed (empty list) it is not submitted nor checked in
        for t in tensors:
            nbytes = t.numel() * t.element_size()
            if nbytes > self.area.nbytes:
                self.skipped.append(f"small[{part}]")
                continue
            if nbytes > buf.room:
                self._submit_part(part, buf)
                part += 1
                buf = self.area.checkout(f"small-{part}")  # clean: near miss, the tensor at hand is packed next so it is not empty at the end
            buf.fill(t)
        if buf.used:
            self._submit_part(part, buf)
        return part + 1

    def _submit_part(self, part: int, buf: HostBuffer) -> None:
        torch.cuda.current_stream().synchronize()
        self.writers.submit(WriteJob(self.root / f"small-{part}.bin", buf, self.area))

    def stage_shared(self, params: list[torch.nn.Parameter]) -> None:
        """Keep host copies until the peers have fetched them (drop_shared)."""
        for p in params:
            key = p.untyped_storage().data_ptr()
            buf = self.area.try_checkout(f"shared-{key:x}")  # leak: tied parameters have the same key and the first buffer is overwritten
            if buf is None:
                break
            flat = p.detach().contiguous().view(-1).view(torch.uint8)
            buf.used = min(flat.numel(), buf.room)
            buf.storage[:buf.used].copy_(flat[:buf.used])
            self._shared[key] = buf

    def drop_shared(self) -> None:
        while self._shared:
            _, buf = self._shared.popitem()
            self.area.checkin(buf)

    def mirror(self, name: str, tensor: torch.Tensor) -> bool:
        """Write two independent copies, for the tensors nobody can recompute."""
        try:
            left = self.area.checkout(f"{name}.a", timeout=5.0)  # leak: the second checkout may raise StagingExhausted, which is handled below
            right = self.area.checkout(f"{name}.b", timeout=5.0)  # clean: both jobs are submitted and finished by the writers
        except StagingExhausted:
            log.warning("mirror of %s skipped", name)
            return False
        for side, buf in (("a", left), ("b", right)):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            buf.used = min(flat.numel(), buf.room)
            buf.storage[:buf.used].copy_(flat[:buf.used])
            self.writers.submit(WriteJob(self.root / f"{name}.{side}.bin", buf, self.area))
        return True

    def checksum(self, tensor: torch.Tensor) -> str | None:
        buf = self.area.try_checkout("checksum")  # clean: None has nothing to give back and the rest is in finally
        if buf is None:
            return None
        try:
            if buf.fill(tensor) == 0:
                return ""
            return hashlib.sha1(buf.storage[:buf.used].numpy().tobytes()).hexdigest()
        finally:
            self.area.checkin(buf)


class StagedReader:
    """Loads parts back through the same pinned memory when a rank resumes."""

    def __init__(self, area: StagingArea, root: Path):
        self.area = area
        self.root = root

    def load_group(self, targets: dict[str, torch.Tensor]) -> int:
        held: list[HostBuffer] = []
        try:
            for name, dest in targets.items():
                buf = self.area.checkout(name)  # clean: near miss, a raise by a later checkout still runs the finally over held
                held.append(buf)
                self._read_into(self.root / f"{name}.bin", buf)
                dest.view(-1).view(torch.uint8).copy_(buf.storage[:buf.used], non_blocking=True)
            torch.cuda.current_stream().synchronize()
            return len(held)
        finally:
            for buf in held:
                self.area.checkin(buf)

    def _read_into(self, path: Path, buf: HostBuffer) -> None:
        data = path.read_bytes()
        if len(data) > buf.storage.numel():
            raise ValueError(f"{path} is larger than a staging buffer")
        buf.storage[:len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        buf.used = len(data)
