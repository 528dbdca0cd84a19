"""Writing of shards: staging on the trainer's thread, disk on a pool of threads."""
from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from .arena import InflightBudget, Region, StagingArena


@dataclass
class ShardJob:
    path: str
    regions: list[Region] = field(default_factory=list)
    charged: int = 0
    crc: int = 0


class ShardWriter:
    def __init__(self, arena: StagingArena, budget: InflightBudget, threads: int = 4):
        self.arena = arena
        self.budget = budget
        self.exec = ThreadPoolExecutor(threads, thread_name_prefix="ckpt")
        self.waiting: list[ShardJob] = []

    # -- staging -------------------------------------------------------------------------------------------
    def stage(self, path: str, tensors: list[torch.Tensor]) -> ShardJob:
        """Copies the tensors to staging memory. The job goes to submit() or discard()."""
        job = ShardJob(path)
        for t in tensors:
            raw = t.detach().cpu().contiguous().view(torch.uint8).numpy().data
            for at in range(0, len(raw), self.arena.page_bytes):
                piece = raw[at : at + self.arena.page_bytes]
                region = self.arena.reserve()  # clean: listed in the job, discard surrenders all
                region.buf[: len(piece)] = piece
                region.filled = len(piece)
                job.regions.append(region)
        return job

    def discard(self, job: ShardJob) -> None:
        for r in job.regions:
            self.arena.surrender(r)
        job.regions.clear()

    # -- writing -------------------------------------------------------------------------------------------
    def submit(self, job: ShardJob) -> Future:
        size = sum(r.filled for r in job.regions)
        job.charged = self.budget.charge(size)  # clean: near miss, _finish refunds it when the write is done
        fut = self.exec.submit(self._write, job)
        fut.add_done_callback(lambda _f: self._finish(job))
        return fut

    def _write(self, job: ShardJob) -> int:
        tmp = job.path + ".part"
        total = 0
        with open(tmp, "wb", buffering=0) as f:  # clean: with closes it
            for r in job.regions:
                f.write(r.buf[: r.filled])
                job.crc = zlib.crc32(r.buf[: r.filled], job.crc)
                total += r.filled
            os.fsync(f.fileno())
        os.replace(tmp, job.path)
        return total

    def _finish(self, job: ShardJob) -> None:
        self.discard(job)
        self.budget.refund(job.charged)
        job.charged = 0

    def submit_later(self, path: str, tensors: list[torch.Tensor]) -> None:
        self.waiting.append(self.stage(path, tensors))  # leak: close() empties waiting, no discard

    def kick(self, limit: int) -> list[Future]:
        futs = []
        while self.waiting and len(futs) < limit:
            futs.append(self.submit(self.waiting.pop(0)))
        return futs

    def close(self) -> None:
        self.waiting = []
        self.exec.shutdown(wait=True)


def write_header(path: str, meta: dict, overwrite: bool) -> bool:
    f = open(path, "a+b")  # leak: an existing header that must not be overwritten returns without close
    if f.tell() and not overwrite:
        return False
    f.truncate(0)
    f.write(json.dumps(meta).encode())
    f.close()
    return True


def verify_shard(path: str, crc: int, arena: StagingArena) -> bool:
    window = arena.reserve()  # clean: finally surrenders it
    try:
        have = 0
        with open(path, "rb") as f:  # clean: with closes it
            while True:
                n = f.readinto(window.buf)
                if not n:
                    break
                have = zlib.crc32(window.buf[:n], have)
        return have == crc
    finally:
        arena.surrender(window)


def copy_shard(src: str, dst: str, arena: StagingArena, retries: int = 3) -> bool:
    """Copies between file systems; a short write starts the copy afresh."""
    for _ in range(retries):
        window = arena.reserve()  # leak: a short copy goes to the next attempt with a new window
        done = 0
        with open(src, "rb") as fin, open(dst, "wb") as fout:  # clean: with closes both
            while n := fin.readinto(window.buf):
                done += fout.write(window.buf[:n])
        if done == os.path.getsize(src):
            arena.surrender(window)
            return True
    return False
