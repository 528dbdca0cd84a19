"""Asynchronous sharded checkpoint writer.

The trainer thread copies tensors into host blocks and queues them; writer
threads stream them to disk under a byte budget.  One directory lock keeps two
jobs from writing the same step.
"""
from __future__ import annotations

import json
import logging
import os
import queue
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator, Optional

import torch

log = logging.getLogger(__name__)


class ByteBudget:
    """A counter of host bytes in flight."""

    def __init__(self, limit: int):
        self.limit = limit
        self.used = 0
        self._cv = threading.Condition()

    def charge(self, n: int) -> int:
        with self._cv:
            self._cv.wait_for(lambda: self.used == 0 or self.used + n <= self.limit)
            self.used += n
        return n

    def try_charge(self, n: int) -> bool:
        with self._cv:
            if self.used and self.used + n > self.limit:
                return False
            self.used += n
            return True

    def refund(self, n: int) -> None:
        with self._cv:
            self.used -= n
            self._cv.notify_all()


class HostBlocks:
    def __init__(self, count: int, size: int):
        self.size = size
        self._q: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._q.put(torch.empty(size, dtype=torch.uint8, pin_memory=True))

    def fetch(self, wait: bool = True) -> Optional[torch.Tensor]:
        try:
            return self._q.get(block=wait)  # clean: returned to the caller
        except queue.Empty:
            return None

    def put_back(self, block: torch.Tensor) -> None:
        self._q.put(block)

    @contextmanager
    def borrowed(self) -> Iterator[torch.Tensor]:
        block = self.fetch()  # clean: put back in the finally of the context manager
        try:
            yield block
        finally:
            self.put_back(block)


@dataclass
class Chunk:
    path: str
    offset: int
    block: torch.Tensor
    nbytes: int
    charged: bool = False
    meta: dict[str, Any] = field(default_factory=dict)


class StepLock:
    """An exclusive lock file for a step directory."""

    def __init__(self, root: str):
        self.root = root

    def claim(self, step: int) -> Optional[int]:
        path = os.path.join(self.root, f"step_{step}.lock")
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)  # clean: the descriptor is returned
        except FileExistsError:
            return None

    def drop(self, step: int, fd: int) -> None:
        os.close(fd)
        os.unlink(os.path.join(self.root, f"step_{step}.lock"))


class CheckpointWriter:
    def __init__(self, root: str, blocks: HostBlocks, budget: ByteBudget, threads: int = 4):
        self.root = root
        self.blocks = blocks
        self.budget = budget
        self.locks = StepLock(root)
        self.todo: queue.Queue[Optional[Chunk]] = queue.Queue()
        self.errors: list[str] = []
        self._step_fd: Optional[int] = None
        self._step = -1
        self._threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(threads)]
        for t in self._threads:
            t.start()

    def begin(self, step: int) -> bool:
        if self._step_fd is not None:
            raise RuntimeError(f"step {self._step} still open")
        fd = self.locks.claim(step)  # clean: kept in self._step_fd, dropped by commit()
        if fd is None:
            return False
        self._step_fd = fd
        self._step = step
        return True

    def add(self, name: str, tensor: torch.Tensor, offset: int) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        pos = 0
        while pos < nbytes:
            n = min(self.blocks.size, nbytes - pos)
            block = self.blocks.fetch()  # clean: moved into a Chunk that _loop() puts back
            block[:n].copy_(flat[pos:pos + n], non_blocking=True)
            self.budget.charge(n)  # clean: near miss, refunded by _loop() as the chunk is flagged charged
            self.todo.put(Chunk(self._path(name), offset + pos, block, n, charged=True))
            pos += n

    def add_small(self, name: str, obj: dict[str, Any]) -> bool:
        raw = json.dumps(obj).encode()
        if not self.budget.try_charge(len(raw)):  # leak: the chunk isn't flagged charged, so the writer never refunds
            return False
        block = self.blocks.fetch()  # leak: dropped when the object is larger than a block
        if len(raw) > self.blocks.size:
            self.errors.append(f"{name}: {len(raw)} bytes do not fit")
            return False
        block[:len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        self.todo.put(Chunk(self._path(name), 0, block, len(raw)))
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self.root, f"step_{self._step}", name)

    def _loop(self) -> None:
        while True:
            chunk = self.todo.get()
            if chunk is None:
                self.todo.task_done()
                return
            try:
                self._write(chunk)
            except OSError as exc:
                self.errors.append(f"{chunk.path}: {exc}")
            finally:
                self.blocks.put_back(chunk.block)
                if chunk.charged:
                    self.budget.refund(chunk.nbytes)
                self.todo.task_done()

    def _write(self, chunk: Chunk) -> None:
        fd = os.open(chunk.path, os.O_WRONLY | os.O_CREAT)  # leak: not closed on a short write
        done = os.pwrite(fd, memoryview(chunk.block[:chunk.nbytes].numpy()), chunk.offset)
        if done != chunk.nbytes:
            raise OSError(f"short write {done}/{chunk.nbytes}")
        os.close(fd)

    def commit(self) -> bool:
        self.todo.join()
        ok = not self.errors
        if ok:
            Path(self.root, "latest").write_text(str(self._step))
        fd, self._step_fd = self._step_fd, None
        if fd is not None:
            self.locks.drop(self._step, fd)
        return ok

    def stop(self) -> None:
        for _ in self._threads:
            self.todo.put(None)
        for t in self._threads:
            t.join()


def save_blocking(writer: CheckpointWriter, step: int, state: dict[str, torch.Tensor]) -> int:
    fd = writer.locks.claim(step)  # leak: kept when the state is empty
    if fd is None:
        log.info("step %d is being written by another job", step)
        return 0
    if not state:
        return 0
    total = 0
    try:
        for name, tensor in state.items():
            with writer.blocks.borrowed() as block:  # clean: given back at the end of the with statement
                raw = tensor.detach().cpu().reshape(-1).view(torch.uint8)
                if raw.numel() > writer.blocks.size:
                    continue
                block[:raw.numel()].copy_(raw)
                total += raw.numel()
    finally:
        writer.locks.drop(step, fd)
    return total


def reshard(writer: CheckpointWriter, names: list[str], sizes: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        need = sizes.get(name, 0)
        block = writer.blocks.fetch(wait=False)  # leak: the continue for an empty shard skips put_back()
        if need == 0:
            continue
        if block is None:
            block = writer.blocks.fetch()  # clean: near miss, rebinds only None and is put back in finally
        try:
            yield name, block[:need]
        finally:
            writer.blocks.put_back(block)
