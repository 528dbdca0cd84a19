"""Generations of checkpoints: which are being written, which are complete, which may be removed."""
from __future__ import annotations

import os
import shutil
import threading
import time
import zlib
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from .arena import InflightBudget
from .writer import ShardJob, ShardWriter


class GenerationLocks:
    """Readers hold a generation so that the janitor does not remove it under them."""

    def __init__(self, root: str):
        self.root = root
        self._holders: dict[int, int] = {}
        self._mu = threading.Lock()

    def hold(self, step: int) -> str | None:
        path = os.path.join(self.root, f"step-{step:08d}")
        with self._mu:
            if not os.path.isdir(path):
                return None
            self._holders[step] = self._holders.get(step, 0) + 1
        return path

    def unhold(self, step: int) -> None:
        with self._mu:
            left = self._holders[step] - 1
            if left:
                self._holders[step] = left
            else:
                del self._holders[step]

    def idle(self, step: int) -> bool:
        with self._mu:
            return step not in self._holders


@dataclass
class Generation:
    step: int
    futures: list[Future] = field(default_factory=list)
    jobs: list[ShardJob] = field(default_factory=list)
    budget_bytes: int = 0
    log: object = None


class CheckpointManager:
    def __init__(self, root: str, writer: ShardWriter, budget: InflightBudget, keep: int):
        self.root = root
        self.writer = writer
        self.budget = budget
        self.keep = keep
        self.locks = GenerationLocks(root)
        self.active: dict[int, Generation] = {}
        self.reserved: dict[int, Generation] = {}
        self.done: list[int] = []

    def save(self, step: int, shards: dict[str, list[torch.Tensor]]) -> Generation:
        if step in self.active:
            return self.active[step]
        gen = Generation(step)
        where = os.path.join(self.root, f"step-{step:08d}")
        os.makedirs(where, exist_ok=True)
        gen.log = open(os.path.join(where, "save.log"), "a")  # clean: complete() closes it
        for name, tensors in shards.items():
            job = self.writer.stage(os.path.join(where, name), tensors)  # clean: discarded by the callback
            gen.futures.append(self.writer.submit(job))
        self.active[step] = gen
        return gen

    def complete(self, step: int) -> int:
        gen = self.active.pop(step)
        total = sum(f.result() for f in gen.futures)
        gen.log.write(f"{time.time():.3f} {total}\n")
        gen.log.close()
        self.done.append(step)
        return total

    def save_if_changed(self, path: str, tensors: list[torch.Tensor], last_crc: int) -> bool:
        job = self.writer.stage(path, tensors)  # leak: an unchanged shard returns without discard
        crc = 0
        for r in job.regions:
            crc = zlib.crc32(r.buf[: r.filled], crc)
        if crc == last_crc:
            return False
        self.writer.submit(job).result()
        return True

    def reserve_emergency(self, step: int, nbytes: int) -> None:
        """Charges the bytes beforehand, so that the save on SIGTERM need not wait."""
        if step in self.reserved:
            return
        gen = Generation(step)
        gen.budget_bytes = self.budget.charge(nbytes)  # leak: cancel_emergency pops it, no refund
        self.reserved[step] = gen

    def use_emergency(self, step: int, shards: dict[str, list[torch.Tensor]]) -> int:
        gen = self.reserved.pop(step)
        self.budget.refund(gen.budget_bytes)
        self.save(step, shards)
        return self.complete(step)

    def cancel_emergency(self, step: int) -> None:
        gen = self.reserved.pop(step, None)
        if gen is not None:
            for job in gen.jobs:
                self.writer.discard(job)

    # -- reading -------------------------------------------------------------------------------------------
    def load(self, step: int, into: dict[str, torch.Tensor]) -> bool:
        path = self.locks.hold(step)  # clean: None holds nothing, otherwise finally
        if path is None:
            return False
        try:
            for name, t in into.items():
                t.copy_(torch.load(os.path.join(path, name), map_location="cpu"))
        finally:
            self.locks.unhold(step)
        return True

    def latest_with(self, name: str) -> int | None:
        for step in reversed(self.done):
            path = self.locks.hold(step)  # leak: a generation without the file stays held
            if path is None:
                continue
            if os.path.exists(os.path.join(path, name)):
                self.locks.unhold(step)
                return step
        return None

    def prune(self) -> list[int]:
        gone = []
        for step in self.done[: -self.keep]:
            if self.locks.idle(step):
                shutil.rmtree(os.path.join(self.root, f"step-{step:08d}"), ignore_errors=True)
                gone.append(step)
        self.done = [s for s in self.done if s not in gone]
        return gone
